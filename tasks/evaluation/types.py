"""One answer to one held-out problem as it is graded and shown, and what gives answers."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.schema.evaluation import EvaluationSampling
from tasks.rewards.verdict import Outcome


@dataclass(frozen=True)
class AnswerRecord:
    """One sample of one problem; a line of `snapshot.jsonl` and `policy.jsonl`."""

    row_id: str
    sample: int
    """0 … S−1."""
    band: str
    seed: int
    """Depends on (`evaluation.sampling.seed`, row, sample) only: the same for every model."""
    outcome: Outcome
    gold: str
    extracted: str | None
    """The answer as the verifier read it; None where it found none."""
    normalised: str | None
    """The form in which answers are compared for stability; None where there is no answer."""
    reason: str
    tokens: int
    """Sampled by the policy, over all its turns."""
    turns: int
    truncated: bool
    """The last turn was cut off by the token limit or the context."""
    tool_calls: int
    tool_errors: int
    messages: tuple[dict[str, str], ...]
    """The conversation, prompt included."""

    @property
    def correct(self) -> bool:
        """Unscored is an error, never correct; it is counted apart in `outcomes`."""
        return self.outcome is Outcome.CORRECT

    def to_json(self) -> dict[str, Any]:
        """The line as written."""
        return {**asdict(self), "outcome": self.outcome.value}


@dataclass(frozen=True)
class ServedModel:
    """A model as its bundle serves it."""

    gguf: Path
    tokenizer: Path
    """Folder of the tokenizer it was trained with."""
    system_prompt: str | None
    tools: tuple[str, ...]
    sampling: EvaluationSampling
    """Greedy, one sample, the bundle's limits."""
