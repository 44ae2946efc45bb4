"""What the loop shows live and keeps for the summary: lag, throughput, overlap, proofs."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tasks.rl.learner import StepReport
from tasks.rl.rollout_worker import Harvest
from tasks.rl.types import Group
from tasks.rl.weight_sync import SyncProof
from tasks.sampling.types import Rollout

COUNTS = (
    "samples", "skipped_steps", "suspicions", "proofs", "episodes", "generated_tokens",
    "carried_episodes", "tool_calls", "tool_errors", "tool_timeouts", "abandoned_tool_calls",
    "refused_samples", "overdue_plays", "abandoned_prompts", "worker_losses", "divergences",
)  # fmt: skip
SHOWN_ONCE_COUNTED = (
    "abandoned_tool_calls", "refused_samples", "overdue_plays", "worker_losses", "divergences",
)  # fmt: skip
"""Counts over the run that are a metric from their first on."""


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
        self.counts: Counter[str] = Counter()
        """Whole numbers over the run, by the names of `COUNTS`."""
        self.effective_samples = 0.0
        self.max_staleness_seen = 0
        self.overlap = Overlap()
        self._playing = 0
        self._playing_since_s = 0.0
        self._rollout_s = 0.0
        self._forget_cycle()

    def _forget_cycle(self) -> None:
        self._cycle: Counter[str] = Counter()
        self._temperature: float | None = None
        self._canary_distance: float | None = None

    def count(self, name: str, amount: int = 1) -> None:
        """Count something of `COUNTS`, over the run and in this cycle."""
        assert name in COUNTS, name
        self.counts[name] += amount
        self._cycle[name] += amount

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Episodes are on their way inside the block; blocks may overlap."""
        if not self._playing:
            self._playing_since_s = time.monotonic()
        self._playing += 1
        try:
            with self.overlap.working("rollout"):
                yield
        finally:
            self._book_playing()
            self._playing -= 1

    def _book_playing(self) -> None:
        """Add the time in which anything was being played, up to now."""
        now_s = time.monotonic()
        if self._playing:
            self._rollout_s += now_s - self._playing_since_s
        self._playing_since_s = now_s

    def generated(self, harvest: Harvest, temperature: float) -> None:
        """Note what one play brought."""
        rollouts = harvest.rollouts
        self.count("generated_tokens", harvest.generated_tokens)
        self.count("episodes", len(rollouts))
        self.count("carried_episodes", sum(_carried(r) for r in rollouts))
        for name in ("tool_calls", "tool_errors", "tool_timeouts"):
            self.count(name, sum(getattr(r, name) for r in rollouts))
        self.count("refused_samples", len(harvest.refused))
        self.count("abandoned_tool_calls", harvest.abandoned_tool_calls)
        self._temperature = temperature

    def proven(self, proof: SyncProof) -> None:
        """Note one passed sync proof."""
        self.count("proofs")
        self._canary_distance = proof.distance

    def trained(
        self, groups: Sequence[Group], ages: Sequence[int], report: StepReport
    ) -> dict[str, float]:
        """Note one batch; returns the step's metrics, rollout side included."""
        rollouts = [r.rollout for g in groups for r in g.rollouts]
        self.count("samples", len(rollouts))
        self.count("skipped_steps", report.skipped)
        self.effective_samples += report.effective_samples
        self.max_staleness_seen = max(self.max_staleness_seen, *ages)
        metrics = dict(report.metrics)
        metrics["staleness_mean"] = sum(ages) / len(ages)
        metrics["staleness_max"] = float(max(ages))
        metrics["skipped_steps"] = float(self.counts["skipped_steps"])
        metrics["mixed_groups_share"] = _mixed_share(groups)
        metrics["trained_tokens_mean"] = sum(r.sampled_tokens for r in rollouts) / len(rollouts)
        metrics |= self._generation()
        if self.overlap.any_s:
            metrics["overlap_share"] = self.overlap.both_s / self.overlap.any_s
        self._forget_cycle()
        return metrics

    def _generation(self) -> dict[str, float]:
        """The rollout side's figures since the last step."""
        self._book_playing()
        metrics, cycle = {}, self._cycle
        if cycle["generated_tokens"] and self._rollout_s > 0:  # plays end in bursts: not yet, not 0
            metrics["rollout_tokens_per_s"] = cycle["generated_tokens"] / self._rollout_s
            self._rollout_s = 0.0
        if cycle["episodes"]:
            metrics["generated_tokens_mean"] = cycle["generated_tokens"] / cycle["episodes"]
            metrics["carried_share"] = cycle["carried_episodes"] / cycle["episodes"]
        if cycle["tool_calls"]:
            metrics["tool_error_share"] = cycle["tool_errors"] / cycle["tool_calls"]
            metrics["tool_timeout_share"] = cycle["tool_timeouts"] / cycle["tool_calls"]
        for name in SHOWN_ONCE_COUNTED:
            if self.counts[name]:
                metrics[name] = float(self.counts[name])
        if self._temperature is not None:
            metrics["temperature"] = self._temperature
        if self._canary_distance is not None:
            metrics["canary_distance"] = self._canary_distance
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """JSON-able counts, those of samples that still wait for their step included."""
        return {
            "counts": dict(self.counts),
            "effective_samples": self.effective_samples,
            "max_staleness_seen": self.max_staleness_seen,
            "both_s": self.overlap.both_s,
            "any_s": self.overlap.any_s,
            "cycle": dict(self._cycle),
            "temperature": self._temperature,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.counts = Counter({str(k): int(v) for k, v in state["counts"].items()})
        self.effective_samples = float(state["effective_samples"])
        self.max_staleness_seen = int(state["max_staleness_seen"])
        self.overlap.both_s = float(state["both_s"])
        self.overlap.any_s = float(state["any_s"])
        self._cycle = Counter({str(k): int(v) for k, v in state["cycle"].items()})
        self._temperature = state["temperature"]


def _carried(rollout: Rollout) -> bool:
    """Whether more than one version sampled an episode."""
    versions = {span.version for turn in rollout.turns for span in turn.versions}
    return len(versions) > 1


def _mixed_share(groups: Sequence[Group]) -> float:
    """Share of groups whose outcomes differ: the ones that can teach a group estimator."""
    mixed = sum(len({r.outcome for r in g.rollouts if r.outcome is not None}) > 1 for g in groups)
    return mixed / len(groups)
