"""What a gate says: passed or not, which expectations failed, which rows failed them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One expectation and what it found."""

    code: str
    """Short name of what was checked, e.g. `row_count`."""
    expectation: str
    """Great Expectations' own name."""
    column: str | None
    passed: bool
    observed: Any = None
    unexpected_count: int = 0
    unexpected_share: float = 0.0
    """Of all rows, missing ones included."""
    expected: dict[str, Any] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    error: str = ""
    """Why it could not be evaluated; such a check has failed."""


@dataclass(frozen=True)
class RowFailure:
    """One row that failed one check."""

    row: str
    """Value of the index column."""
    code: str


@dataclass(frozen=True)
class GateVerdict:
    """A gate's verdict over one frame. A gate that evaluated nothing has not passed (A23)."""

    suite: str
    passed: bool
    evaluated_rows: int
    checks: tuple[Check, ...] = ()
    row_failures: tuple[RowFailure, ...] = ()
    reason: str = ""
    """Why nothing could be evaluated."""
    seconds: float = field(default=0.0, compare=False)
    """Time Great Expectations took."""

    @property
    def failed_checks(self) -> tuple[Check, ...]:
        """Checks that failed."""
        return tuple(check for check in self.checks if not check.passed)

    def why(self) -> str:
        """One line a person can act on; empty where the gate passed."""
        if self.passed:
            return ""
        parts = [self.reason] if self.reason else []
        for check in self.failed_checks:
            if check.error:
                found = check.error
            elif check.unexpected_count:
                found = f"{check.unexpected_count} rows fail"
            else:
                found = f"observed {check.observed}, expected {check.expected}"
            parts.append(f"{check.code}: {found}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON."""
        return {
            "suite": self.suite,
            "passed": self.passed,
            "evaluated_rows": self.evaluated_rows,
            "reason": self.why(),
            "seconds": self.seconds,
            "checks": [
                {
                    "code": c.code,
                    "expectation": c.expectation,
                    "column": c.column,
                    "passed": c.passed,
                    "observed": c.observed,
                    "expected": c.expected,
                    "unexpected_count": c.unexpected_count,
                    "unexpected_share": c.unexpected_share,
                    "error": c.error,
                }
                for c in self.checks
            ],
        }


def not_evaluated(suite: str, reason: str) -> GateVerdict:
    """The verdict where there was nothing to look at: failed."""
    return GateVerdict(suite=suite, passed=False, evaluated_rows=0, reason=reason)
