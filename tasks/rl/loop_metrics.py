"""What the loop shows live and keeps for the summary: lag, throughput, overlap, proofs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tasks.rl.learner import StepReport
from tasks.rl.rollout_worker import Harvest
from tasks.rl.types import Group
from tasks.rl.weight_sync import SyncProof


class Overlap:
    """Seconds in which generator and learner both worked; a run without any is synchronous."""

    def __init__(self) -> None:
        self._busy = {"rollout": 0, "train": 0}
        self._since_s = time.monotonic()
        self.both_s = 0.0
        self.any_s = 0.0

    @contextmanager
    def working(self, side: str) -> Iterator[None]:
        """`side` works inside the block."""
        self._turn(side, +1)
        try:
            yield
        finally:
            self._turn(side, -1)

    def _turn(self, side: str, change: int) -> None:
        now_s = time.monotonic()
        if all(self._busy.values()):
            self.both_s += now_s - self._since_s
        if any(self._busy.values()):
            self.any_s += now_s - self._since_s
        self._since_s = now_s
        self._busy[side] += change


class CycleMeter:
    """Counts over the run, and the rollout side's figures since the last step."""

    def __init__(self) -> None:
        self.samples = 0
        self.effective_samples = 0.0
        self.max_staleness_seen = 0
        self.skipped_steps = 0
        self.suspicions = 0
        self.proofs = 0
        self.overlap = Overlap()
        self._forget_cycle()

    def _forget_cycle(self) -> None:
        self._tokens = 0
        self._episodes = 0
        self._rollout_s = 0.0
        self._temperature: float | None = None
        self._canary_distance: float | None = None

    def generated(self, harvest: Harvest, seconds: float, temperature: float) -> None:
        """Note one call of a rollout worker."""
        self._tokens += harvest.generated_tokens
        self._episodes += len(harvest.rollouts)
        self._rollout_s += seconds
        self._temperature = temperature

    def proven(self, proof: SyncProof) -> None:
        """Note one passed sync proof."""
        self.proofs += 1
        self._canary_distance = proof.distance

    def trained(
        self, groups: Sequence[Group], ages: Sequence[int], report: StepReport
    ) -> dict[str, float]:
        """Note one batch; returns the step's metrics, rollout side included."""
        samples = sum(len(g.rollouts) for g in groups)
        self.samples += samples
        self.effective_samples += report.effective_samples
        self.skipped_steps += report.skipped
        self.max_staleness_seen = max(self.max_staleness_seen, *ages)
        metrics = dict(report.metrics)
        metrics["staleness_mean"] = sum(ages) / len(ages)
        metrics["staleness_max"] = float(max(ages))
        metrics["skipped_steps"] = float(self.skipped_steps)
        metrics["mixed_groups_share"] = _mixed_share(groups)
        if self._rollout_s > 0:
            metrics["rollout_tokens_per_s"] = self._tokens / self._rollout_s
            metrics["generated_tokens_mean"] = self._tokens / self._episodes
        if self._temperature is not None:
            metrics["temperature"] = self._temperature
        if self._canary_distance is not None:
            metrics["canary_distance"] = self._canary_distance
        if self.overlap.any_s:
            metrics["overlap_share"] = self.overlap.both_s / self.overlap.any_s
        self._forget_cycle()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """JSON-able counts."""
        return {
            "samples": self.samples,
            "effective_samples": self.effective_samples,
            "max_staleness_seen": self.max_staleness_seen,
            "skipped_steps": self.skipped_steps,
            "suspicions": self.suspicions,
            "proofs": self.proofs,
            "both_s": self.overlap.both_s,
            "any_s": self.overlap.any_s,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.samples = int(state["samples"])
        self.effective_samples = float(state["effective_samples"])
        self.max_staleness_seen = int(state["max_staleness_seen"])
        self.skipped_steps = int(state["skipped_steps"])
        self.suspicions = int(state["suspicions"])
        self.proofs = int(state["proofs"])
        self.overlap.both_s = float(state["both_s"])
        self.overlap.any_s = float(state["any_s"])


def _mixed_share(groups: Sequence[Group]) -> float:
    """Share of groups whose outcomes differ: the ones that can teach a group estimator."""
    mixed = sum(len({r.outcome for r in g.rollouts if r.outcome is not None}) > 1 for g in groups)
    return mixed / len(groups)
