"""Runs a Great Expectations suite over one frame and gives a verdict.

Each call makes its own ephemeral context, under a lock: Great Expectations keeps a process-wide
current project, and threads that shared one got verdicts on one another's data.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.gates.verdict import Check, GateVerdict, RowFailure, not_evaluated

if TYPE_CHECKING:
    import pandas as pd

INDEX_COLUMN = "row"
"""Column whose values name failing rows."""
MAX_EXAMPLES = 5

_CHATTY = "great_expectations.data_context.types.base"
_ONE_AT_A_TIME = threading.Lock()

Suite = tuple[str, list[Any]]
"""Name, and the expectations in the order they are shown; each has `meta["code"]`."""


def validate_frame(frame: "pd.DataFrame", suite: Suite) -> GateVerdict:
    """Verdict on `frame`, which needs a column `row` with one name per row.

    No rows at all is a failure whatever the suite says (A23).
    """
    name, expectations = suite
    with _ONE_AT_A_TIME:
        start_s = time.monotonic()
        result = _run(frame, name, expectations)
        seconds = time.monotonic() - start_s
    by_code = {r["expectation_config"]["meta"]["code"]: r for r in result["results"]}
    checks = tuple(_check(by_code[e.meta["code"]], len(frame)) for e in expectations)
    failures = tuple(f for e in expectations for f in _row_failures(by_code[e.meta["code"]]))
    passed = bool(checks) and all(check.passed for check in checks) and len(frame) > 0
    reason = "" if len(frame) else "no rows to evaluate"
    return GateVerdict(name, passed, len(frame), checks, failures, reason, seconds)


def validate_file(path: Path, suite: Suite, read: "Callable[[Path], pd.DataFrame]") -> GateVerdict:
    """Verdict on a file; a missing one fails the gate instead of being skipped (A23)."""
    if not path.is_file():
        return not_evaluated(suite[0], f"{path}: no such file")
    return validate_frame(read(path), suite)


def _run(frame: "pd.DataFrame", name: str, expectations: list[Any]) -> dict[str, Any]:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    logging.getLogger(_CHATTY).setLevel(logging.WARNING)  # a line for every context otherwise
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    batch = (
        context.data_sources.add_pandas("frames")
        .add_dataframe_asset(name)
        .add_batch_definition_whole_dataframe("whole")
        .get_batch({"dataframe": frame})
    )
    result = batch.validate(
        gx.ExpectationSuite(name=name, expectations=expectations),
        result_format={
            "result_format": "COMPLETE",
            "unexpected_index_column_names": [INDEX_COLUMN],
        },
    )
    return dict(result.to_json_dict())


def _check(result: dict[str, Any], rows: int) -> Check:
    config, found = result["expectation_config"], result["result"]
    kwargs = {k: v for k, v in config["kwargs"].items() if k not in ("batch_id", "column")}
    unexpected = int(found.get("unexpected_count", 0))
    error = _error(result["exception_info"]) or _vacuous(found, rows)
    return Check(
        code=config["meta"]["code"],
        expectation=config["type"],
        column=config["kwargs"].get("column"),
        passed=bool(result["success"]) and not error,
        observed=found.get("observed_value"),
        unexpected_count=unexpected,
        unexpected_share=unexpected / rows if rows else 0.0,
        expected=kwargs,
        examples=tuple(
            str(v)[:80] for v in found.get("partial_unexpected_list", [])[:MAX_EXAMPLES]
        ),
        error=error,
    )


def _error(info: dict[str, Any]) -> str:
    """First message of an exception a metric raised; empty where none did."""
    entries = [info] if "raised_exception" in info else list(info.values())
    raised = [e for e in entries if e.get("raised_exception")]
    return str(raised[0].get("exception_message") or "raised")[:300] if raised else ""


def _vacuous(found: dict[str, Any], rows: int) -> str:
    """Why a check of values looked at none of a frame that has rows; empty where it looked (A23).

    Great Expectations passes such a check: its row condition selected nothing, or every value is
    missing.
    """
    looked_at, missing = found.get("element_count"), found.get("missing_count", 0)
    if rows == 0 or looked_at is None:
        return ""
    if looked_at == 0:
        return "evaluated nothing: its row condition selects no row"
    return "evaluated nothing: every value is missing" if missing == looked_at else ""


def _row_failures(result: dict[str, Any]) -> list[RowFailure]:
    code = result["expectation_config"]["meta"]["code"]
    rows = result["result"].get("unexpected_index_list") or []
    return [RowFailure(str(row[INDEX_COLUMN]), code) for row in rows]
