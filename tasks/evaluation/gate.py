"""The promotion gate: may this policy go on? Pure; unknown never passes (A21)."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from configs.schema.evaluation import PromotionGate


@dataclass(frozen=True)
class Check:
    """One condition: what was measured, against which limit."""

    name: str
    value: float | None
    """None where it is unknown or not finite."""
    limit: float
    passed: bool
    reason: str
    """One sentence for a person, also where it passed."""


@dataclass(frozen=True)
class GateVerdict:
    """Passed only if every check passed, and there was at least one."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether the policy may be promoted."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """Why it may not; empty where it passed."""
        return [check.reason for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        """As it goes into `summary.json`; an unknown value is null."""
        return {
            "passed": self.passed,
            "reasons": self.reasons,
            "checks": [asdict(check) for check in self.checks],
        }


def _check(name: str, value: float | None, limit: float, *, above: bool) -> Check:
    """`above`: the value must lie strictly above the limit; otherwise it may reach it at most."""
    known = value is not None and math.isfinite(value)
    if value is None or not known:
        return Check(name, None, limit, False, f"{name} is unknown; it decides at {limit:g}")
    passed = value > limit if above else value <= limit
    wanted = f"{'above' if above else 'at most'} {limit:g}"
    reason = f"{name} is {value:.4f}, {wanted if passed else 'not ' + wanted}"
    return Check(name, value, limit, passed, reason)


def judge(
    gate: PromotionGate, *, delta_ci_low: float | None, truncated_share: float | None
) -> GateVerdict:
    """Hold the policy against `evaluation.gate`.

    Args:
        gate: the limits.
        delta_ci_low: lower end of the paired 95 % interval, policy accuracy minus snapshot's.
        truncated_share: share of the policy's answers that were cut off.
    """
    name = "lower end of the accuracy difference"
    return GateVerdict(
        (
            _check(name, delta_ci_low, gate.min_delta_ci_low, above=True),
            _check(
                "share of truncated answers",
                truncated_share,
                gate.max_truncated_share,
                above=False,
            ),
        )
    )
