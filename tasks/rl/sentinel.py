"""The reward sentinel: a batch whose rewards look wrong makes the grader prove itself.

A pure state machine. `observe` looks at a batch and names a suspicion; the caller lets the grader
answer probes whose right answers are known; `judge` decides. Only a failed probe trips the breaker:
a hard batch, or a policy that got good, looks suspicious too and is no reason to stop. Feed it
outcomes rather than shaped rewards, so that "all zero" means that nothing was solved.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from configs.schema.rl import SentinelConfig
from tasks.rl.credit import require_finite


class SuspicionKind(str, Enum):
    """What looks wrong. `ALL_ONE`: every scored reward is the same and not 0."""

    ALL_ZERO = "all_zero"
    ALL_ONE = "all_one"
    UNSCORED = "unscored"
    DRIFT = "drift"


class Decision(str, Enum):
    """What becomes of a suspicious batch; `TRIP` also stops the run, resumably."""

    TRAIN = "train"
    DROP_AND_CONTINUE = "drop_and_continue"
    TRIP = "trip"


@dataclass(frozen=True)
class Suspicion:
    """One batch that looks wrong; `mean` is None where nothing was scored."""

    kind: SuspicionKind
    detail: str
    mean: float | None
    unscored_share: float


@dataclass(frozen=True)
class ProbeResult:
    """The grader's score for an answer whose score is known; `got` None = could not score."""

    probe_id: str
    expected: float | None
    got: float | None

    @property
    def passed(self) -> bool:
        """True = the grader gave the expected score."""
        return self.got == self.expected


class SentinelTrippedError(RuntimeError):
    """The breaker is open: the grader failed known-answer probes and has not passed them since."""

    def __init__(self, failed_probes: Sequence[str]) -> None:
        super().__init__(tuple(failed_probes))
        self.failed_probes = tuple(failed_probes)

    def __str__(self) -> str:
        return (
            f"the grader failed known-answer probes {list(self.failed_probes)}; no batch is "
            "trained on until it passes them: fix the grader, then resume"
        )


class NoProbesError(ValueError):
    """A suspicion was to be judged without a single probe result: nothing is known."""


class EmptyBatchError(ValueError):
    """A batch without a single reward, scored or not."""


class RewardSentinel:
    """Watches the rewards of each batch and guards training from a broken grader.

    The running mean and variance of batch means weigh batch n by max(1/n, 1/`memory`): Welford's
    exact statistics first, an exponential average later, so that honest progress is followed. A
    batch enters them only once it is known to be trained on.
    """

    def __init__(self, config: SentinelConfig, memory: int = 20) -> None:
        """`memory`: batches the running statistics reach back."""
        self._config = config
        self._memory = memory
        self._batches = 0
        self._mean = 0.0
        self._variance = 0.0
        self._consecutive_drops = 0
        self._failed_probes: tuple[str, ...] = ()

    @property
    def tripped(self) -> bool:
        """True = a probe failed and the grader has not been re-armed."""
        return bool(self._failed_probes)

    @property
    def consecutive_drops(self) -> int:
        """Batches dropped in a row; the caller bounds its refills by this."""
        return self._consecutive_drops

    def observe(self, rewards: Sequence[float | None]) -> Suspicion | None:
        """Look at a batch's rewards; None = train on it.

        Raises:
            SentinelTrippedError: the breaker is open.
            NonFiniteRewardError: a reward is NaN or infinite.
            EmptyBatchError: there are no rewards.
        """
        self._require_closed()
        if not rewards:
            raise EmptyBatchError("an empty batch has no rewards to judge; expected at least one")
        require_finite(rewards)
        scored = [float(r) for r in rewards if r is not None]
        suspicion = self._suspect(scored, rewards.count(None) / len(rewards))
        if suspicion is None:
            self._absorb(math.fsum(scored) / len(scored))
            self._consecutive_drops = 0
        return suspicion

    def judge(self, suspicion: Suspicion, probe_results: Sequence[ProbeResult]) -> Decision:
        """Decide over a suspicious batch by what the grader said to known answers.

        Any failed probe trips the breaker. With all passed, a batch that has nothing to teach (all
        zero, or nothing scored) is dropped and every other one is trained on.

        Raises:
            NoProbesError: no probe was run, so nothing is known.
        """
        self._require_closed()
        failed = _failed(probe_results)
        if failed:
            self._failed_probes = failed
            return Decision.TRIP
        if suspicion.kind is SuspicionKind.ALL_ZERO or suspicion.mean is None:
            self._consecutive_drops += 1
            return Decision.DROP_AND_CONTINUE
        self._absorb(suspicion.mean)
        self._consecutive_drops = 0
        return Decision.TRAIN

    def rearm(self, probe_results: Sequence[ProbeResult]) -> None:
        """Close the breaker again, on resume, once the grader passes every probe.

        Raises:
            SentinelTrippedError: a probe still fails.
        """
        self._failed_probes = _failed(probe_results)
        self._require_closed()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "batches": self._batches,
            "mean": self._mean,
            "variance": self._variance,
            "consecutive_drops": self._consecutive_drops,
            "failed_probes": list(self._failed_probes),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; an open breaker stays open."""
        self._batches = int(state["batches"])
        self._mean = float(state["mean"])
        self._variance = float(state["variance"])
        self._consecutive_drops = int(state["consecutive_drops"])
        self._failed_probes = tuple(state["failed_probes"])

    def _suspect(self, scored: list[float], unscored_share: float) -> Suspicion | None:
        mean = math.fsum(scored) / len(scored) if scored else None

        def suspicion(kind: SuspicionKind, detail: str) -> Suspicion:
            return Suspicion(kind, detail, mean, unscored_share)

        if scored and not any(scored):
            return suspicion(SuspicionKind.ALL_ZERO, f"all {len(scored)} scored rewards are 0")
        if mean is None or unscored_share > self._config.max_unscored_share:
            return suspicion(
                SuspicionKind.UNSCORED,
                f"{unscored_share:.0%} unscored, limit {self._config.max_unscored_share:.0%}",
            )
        if min(scored) == max(scored):
            return suspicion(
                SuspicionKind.ALL_ONE, f"all {len(scored)} scored rewards are {scored[0]:g}"
            )
        sigmas = self._drift_sigmas(mean, scored)
        if self._batches >= self._config.warmup_batches and sigmas > self._config.drift_sigmas:
            return suspicion(
                SuspicionKind.DRIFT,
                f"mean {mean:.3g} is {sigmas:.1f} deviations from {self._mean:.3g}, "
                f"limit {self._config.drift_sigmas:g}",
            )
        return None

    def _drift_sigmas(self, mean: float, scored: list[float]) -> float:
        """How far the mean is off, in running deviations.

        The deviation is never taken below the batch's own standard error: a few batches that happen
        to agree would make any chance difference look like drift.
        """
        squares = math.fsum((r - mean) ** 2 for r in scored)
        standard_error = math.sqrt(squares) / len(scored)
        return abs(mean - self._mean) / max(math.sqrt(self._variance), standard_error)

    def _absorb(self, mean: float) -> None:
        """Welford's update with weight 1/n, held at 1/memory: population variance of means."""
        self._batches += 1
        weight = max(1 / self._batches, 1 / self._memory)
        difference = mean - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference**2)

    def _require_closed(self) -> None:
        if self._failed_probes:
            raise SentinelTrippedError(self._failed_probes)


def _failed(probe_results: Sequence[ProbeResult]) -> tuple[str, ...]:
    if not probe_results:
        raise NoProbesError("no probe results; expected at least one known-answer probe")
    return tuple(result.probe_id for result in probe_results if not result.passed)
