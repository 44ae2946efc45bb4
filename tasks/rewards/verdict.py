"""What a verifier says of one answer."""

from dataclasses import dataclass
from enum import Enum


class Outcome(str, Enum):
    """`UNSCORED` is never 0 or 1: it leaves the statistics and is counted (A04, A13)."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    UNSCORED = "unscored"


@dataclass(frozen=True)
class Verdict:
    """Outcome, the answer as extracted, and why."""

    outcome: Outcome
    extracted: str | None = None
    reason: str = ""

    @property
    def score(self) -> float | None:
        """1.0 correct, 0.0 wrong or no answer, None unscored."""
        if self.outcome is Outcome.UNSCORED:
            return None
        return 1.0 if self.outcome is Outcome.CORRECT else 0.0
