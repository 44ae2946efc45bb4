"""The suite over a batch of rewards: missing, range, mean, variance, saturation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.gates.validation import INDEX_COLUMN, Suite, validate_frame
from tasks.gates.verdict import GateVerdict

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (INDEX_COLUMN, "reward", "finite", "at_floor", "at_ceiling")


@dataclass(frozen=True)
class RewardLimits:
    """Bounds on one batch; rewards lie in `[floor, ceiling]`."""

    floor: float = 0.0
    ceiling: float = 1.0
    min_rows: int = 1
    max_missing_share: float = 0.2
    min_mean: float | None = None
    max_mean: float | None = None
    min_std: float = 0.0
    """Sample standard deviation."""
    max_saturated_share: float = 1.0
    """Of scored rewards at the floor, and of those at the ceiling."""


def reward_frame(
    rewards: Sequence[float | None], limits: RewardLimits, rows: Sequence[str] | None = None
) -> "pd.DataFrame":
    """Frame of a batch; None and NaN are both unscored. `rows` names the samples."""
    import pandas as pd

    names = list(rows) if rows is not None else [str(i) for i in range(len(rewards))]
    scored = [math.nan if r is None else float(r) for r in rewards]
    return pd.DataFrame(
        {
            INDEX_COLUMN: pd.Series(names, dtype=object),
            "reward": pd.Series(scored, dtype="float64"),
            "finite": pd.Series([not math.isinf(r) for r in scored], dtype=object),
            "at_floor": _indicator(scored, limits.floor),
            "at_ceiling": _indicator(scored, limits.ceiling),
        }
    )


def _indicator(scored: list[float], bound: float) -> "pd.Series":
    import pandas as pd

    values = [math.nan if math.isnan(r) else float(r == bound) for r in scored]
    return pd.Series(values, dtype="float64")


def reward_suite(limits: RewardLimits) -> Suite:
    """Expectations over a reward frame; row count and missing share first."""
    import great_expectations.expectations.core as gxe

    expectations = [
        gxe.ExpectTableRowCountToBeBetween(min_value=limits.min_rows, meta={"code": "row_count"}),
        gxe.ExpectTableColumnsToMatchSet(
            column_set=list(COLUMNS), exact_match=True, meta={"code": "columns"}
        ),
        gxe.ExpectColumnValuesToNotBeNull(
            column="reward", mostly=1 - limits.max_missing_share, meta={"code": "missing"}
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="finite", value_set=[True], meta={"code": "infinite"}
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="reward",
            min_value=limits.floor,
            max_value=limits.ceiling,
            meta={"code": "range"},
        ),
    ]
    if limits.min_mean is not None or limits.max_mean is not None:
        expectations.append(
            gxe.ExpectColumnMeanToBeBetween(
                column="reward",
                min_value=limits.min_mean,
                max_value=limits.max_mean,
                meta={"code": "mean"},
            )
        )
    if limits.min_std > 0:
        expectations.append(
            gxe.ExpectColumnStdevToBeBetween(
                column="reward", min_value=limits.min_std, meta={"code": "variance"}
            )
        )
    for column in ("at_floor", "at_ceiling"):
        expectations.append(
            gxe.ExpectColumnMeanToBeBetween(
                column=column,
                max_value=limits.max_saturated_share,
                meta={"code": f"saturated_{column}"},
            )
        )
    return "rewards", expectations


def gate_rewards(
    rewards: Sequence[float | None], limits: RewardLimits, rows: Sequence[str] | None = None
) -> GateVerdict:
    """Verdict on one batch; a batch with nothing scored fails (A23)."""
    return validate_frame(reward_frame(rewards, limits, rows), reward_suite(limits))
