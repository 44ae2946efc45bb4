"""What an engine is asked and what it answers; the `RolloutEngine` protocol."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from tasks.sampling.errors import SamplingParamsError, ScoreTemperatureError


class StopReason(str, Enum):
    """Why a turn ended."""

    END_OF_TURN = "end_of_turn"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    ABORTED = "aborted"


class PolicyVersion(NamedTuple):
    """The weights an engine holds: the attempt that published them, and its optimiser step."""

    attempt: int
    step: int


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` that one version sampled: offsets inside a completion, positions of
    `Rollout.token_ids` inside a turn."""

    start: int
    end: int
    version: PolicyVersion


@dataclass(frozen=True)
class SamplingParams:
    """How one turn is drawn. No top-k or top-p: μ must be the whole tempered distribution (A06)."""

    temperature: float
    """0 is greedy; logprobs are then those at temperature 1."""
    max_new_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise SamplingParamsError(
                f"temperature={self.temperature}: expected a finite number, 0 (greedy) or above"
            )
        if self.max_new_tokens < 0:
            raise SamplingParamsError(
                f"max_new_tokens={self.max_new_tokens}: expected 0 or more tokens of one turn"
            )


def scored_at(temperature: float) -> float:
    """The temperature that log-probabilities are taken at: 1 where sampling is greedy.

    Raises:
        ScoreTemperatureError: it is below 0, NaN or infinite.
    """
    if not 0 <= temperature < math.inf:
        raise ScoreTemperatureError(
            f"temperature={temperature}: expected a finite number above 0, or 0 for 1"
        )
    return temperature or 1.0


@dataclass(frozen=True)
class GenerateRequest:
    """One turn to sample."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The tokens drawn depend on (weights, prompt, params, seed), not on the batch around them."""
    version: PolicyVersion | None = None
    """The version that must answer (an episode that ends on the weights it began with); None = the
    newest. An engine that holds one version at a time need not look at it: whoever loads weights
    waits for such episodes first."""


@dataclass(frozen=True)
class Completion:
    """One sampled turn. `token_ids` holds the end-of-turn token where the policy sampled it."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """μ: log-probability of each sampled token at the sampling temperature, nats."""
    stop_reason: StopReason
    policy_version: PolicyVersion
    """The oldest version among `spans`."""
    spans: tuple[VersionSpan, ...] = ()
    """Who sampled which tokens, in order and without gaps; empty = `policy_version` all of it."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples turns from one policy version at a time."""

    @property
    def policy_version(self) -> PolicyVersion:
        """The version that samples now."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens one sequence may have, prompt included."""
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Sample one turn for each request, in the order asked."""
        ...

    def load_policy(self, weights: Path, version: PolicyVersion) -> str:
        """Take the published weights and return the hash read back from the engine's memory."""
        ...

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """log p(token t | tokens < t) at `temperature` for t ≥ 1 (canary, parity)."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


@runtime_checkable
class AsyncRolloutEngine(Protocol):
    """Samples turns one by one, many at a time; new weights may come while turns are sampled."""

    @property
    def policy_version(self) -> PolicyVersion:
        """The newest version loaded: the one that begins the next turn."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens one sequence may have, prompt included."""
        ...

    async def complete(self, request: GenerateRequest) -> Completion:
        """Sample one turn; every token is stamped with the version that sampled it."""
        ...

    async def load_policy(self, weights: Path, version: PolicyVersion) -> str:
        """Take the published weights and return the hash read back from the engine's memory."""
        ...

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """log p(token t | tokens < t) at `temperature` for t ≥ 1 under the newest weights."""
        ...

    async def close(self) -> None:
        """Give memory back; turns on their way end with an error."""
        ...


@dataclass(frozen=True)
class Turn:
    """One span the policy sampled: positions `[start, end)` of `Rollout.token_ids`."""

    start: int
    end: int
    stop_reason: StopReason
    policy_version: PolicyVersion
    """The oldest version among `spans`."""
    spans: tuple[VersionSpan, ...] = ()
    """Which version sampled which positions; empty = `policy_version` all of them."""

    @property
    def oldest_version(self) -> PolicyVersion:
        """Version of the oldest token."""
        return min((self.policy_version, *(span.version for span in self.spans)))

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """`spans`, written out where one version sampled it all; empty for an empty turn."""
        if self.spans or self.start == self.end:
            return self.spans
        return (VersionSpan(self.start, self.end, self.policy_version),)


@dataclass(frozen=True)
class Rollout:
    """One episode: prompt, sampled turns and observations, as one token sequence.

    Every per-token field has the length of `token_ids` (T); `sampler_logprobs` is 0.0 where
    `action_mask` is False.
    """

    rollout_id: str
    row_id: str
    group_id: str
    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    """True = a token the policy sampled and is trained on."""
    sampler_logprobs: tuple[float, ...]
    turns: tuple[Turn, ...]
    temperature: float
    messages: tuple[dict[str, str], ...] = ()
    """The conversation as text, prompt included, for grading and for people."""
    final_text: str = ""
    """Text of the last assistant message."""
    truncated: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    """Calls answered by an `error: …` observation, time-outs included."""
    tool_timeouts: int = 0
    """Calls no tool answered in time, retries included."""
    meta: dict[str, float] = field(default_factory=dict)

    @property
    def oldest_version(self) -> PolicyVersion:
        """Version of the oldest sampled token."""
        return min(turn.oldest_version for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self.action_mask)
