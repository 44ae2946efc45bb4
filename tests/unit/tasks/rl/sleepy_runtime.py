"""A `Runtime` in memory whose work is sleeping: the loop's rules without any model.

It stands in for models and processes only. Versions, tickets and weights move exactly as the loop
asks; what the loop must never do (train on something too old, twice, or on unproven weights) is
checked where it would happen.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tasks.artifacts import write_atomic
from tasks.rl.errors import WorkerLostError
from tasks.rl.learner import StepReport
from tasks.rl.rollout_worker import Harvest, Refusal
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group, ScoredRollout
from tasks.rl.weight_sync import Canary, Receipt, SyncProof
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn

TOKENS = (1, 2, 3, 4)


class SleepyRuntime:
    """N workers and a learner that sleep `pace[call]` seconds, give or take half."""

    shares_device = False

    def __init__(
        self,
        limit: int,
        workers: int = 1,
        pace: dict[str, float] | None = None,
        outcome: Callable[[int, int], float | None] = lambda serial, sample: float(sample % 2),
        seed: int = 0,
    ) -> None:
        self.workers = workers
        self.limit = limit
        self.tail = 1.0
        """How many times longer than usual one play in eight takes."""
        self.refuses: Callable[[int, int], bool] = lambda serial, sample: False
        self.dies: Callable[[int], bool] = lambda play: False
        """Whether the worker dies in this play, counted from 1."""
        self.hangs: Callable[[int], bool] = lambda play: False
        self.plays = 0
        self.revived = 0
        self.lr_scales: list[float] = []
        self.pace = pace or {}
        self.outcome = outcome
        self.learner_version = 0
        self.engine: list[PolicyVersion | None] = [None] * workers
        self.proven = [-1] * workers
        self.ever_proven = -1
        self.alive = [True] * workers
        self.trained: list[str] = []
        self.ages: list[int] = []
        self.sampled = 0
        self.probes = [ProbeResult("number-0", 1.0, 1.0)]
        self.updates = 1
        """Optimiser steps a batch is trained on for."""
        self.skip_steps: set[int] = set()
        """Batches, counted from 1, of which every optimiser step is skipped."""
        self.short_steps: set[int] = set()
        """Batches of which one is."""
        self.attempts_at_training = 0
        self.busy = dict.fromkeys(("play", "train"), 0)
        self.spent_s: Counter[str] = Counter()
        self.overlapped = False
        self.stopped = False
        self._random = random.Random(seed)

    async def _work(self, call: str, times: float = 1.0) -> None:
        started_s = time.monotonic()
        await asyncio.sleep(self.pace.get(call, 0.0) * times * self._random.uniform(0.5, 1.5))
        self.spent_s[call] += time.monotonic() - started_s

    async def start(self) -> None:
        await self._work("start")

    async def play(self, worker, tickets, samples, temperature) -> Harvest:
        """Two turns, each of the weights the worker holds when it begins."""
        assert self.proven[worker] >= 0, "sampled with weights that were never proven"
        self.plays += 1
        play = self.plays
        self.busy["play"] += 1
        self.overlapped |= self.busy["train"] > 0
        turns = []
        try:
            for start in (1, 3):
                version = self.engine[worker]
                turns.append(Turn(start, start + 1, StopReason.END_OF_TURN, version))
                await self._work("play", self.tail if self._random.random() < 1 / 8 else 1.0)
                if self.dies(play):
                    self.alive[worker] = False
                if not self.alive[worker]:
                    raise WorkerLostError(worker, "killed")
                if self.hangs(play):
                    await asyncio.sleep(1e6)
        finally:
            self.busy["play"] -= 1
        rollouts, refused = [], []
        for t in tickets:
            for i in range(samples):
                name = f"{t.serial}.{t.reissue}.{i}"
                if self.refuses(t.serial, i):
                    refused.append(Refusal(name, str(t.serial), "NaN"))
                    continue
                rollouts.append(
                    Rollout(
                        name, t.row_id, str(t.serial), TOKENS, (False, True, False, True),
                        (0.0, -1.0, 0.0, -1.0), tuple(turns), temperature,
                    )
                )  # fmt: skip
        self.sampled += len(rollouts)
        return Harvest(tuple(rollouts), 2 * len(rollouts), tuple(refused))

    async def grade(self, worker, rollouts) -> list[Group]:
        await self._work("grade")
        groups: dict[str, list[ScoredRollout]] = {}
        for i, rollout in enumerate(rollouts):
            outcome = self.outcome(int(rollout.group_id), i)
            scored = ScoredRollout(rollout, None, outcome, {"format": 1.0})
            groups.setdefault(rollout.group_id, []).append(scored)
        return [Group(k, v[0].rollout.row_id, tuple(v)) for k, v in groups.items()]

    async def probe(self, worker) -> list[ProbeResult]:
        await self._work("probe")
        return self.probes

    async def sync(self, worker, receipt: Receipt) -> SyncProof:
        assert receipt.version.step <= self.learner_version
        self.engine[worker] = receipt.version  # it samples with them while they are being proven
        await self._work("sync")
        self.proven[worker] = receipt.version.step
        self.ever_proven = max(self.ever_proven, receipt.version.step)
        return SyncProof(receipt.version, 0.0, None)

    async def revive(self, worker) -> None:
        await self._work("start")
        self.engine[worker], self.proven[worker], self.alive[worker] = None, -1, True
        self.revived += 1

    async def train(self, groups, kl_coefficient, lr_scale=1.0, tightness=1.0) -> StepReport:
        self.lr_scales.append(lr_scale)
        newest = max(g.newest_step for g in groups)
        assert newest <= self.ever_proven, "trained on samples of weights nobody has proven"
        ages = [self.learner_version - g.oldest_step for g in groups]
        assert all(0 <= age <= self.limit for age in ages), f"ages {ages}, limit {self.limit}"
        ids = [r.rollout.rollout_id for g in groups for r in g.rollouts]
        assert not set(ids) & set(self.trained), "trained twice"
        self.busy["train"] += 1
        self.overlapped |= self.busy["play"] > 0
        await self._work("train")
        self.busy["train"] -= 1
        self.attempts_at_training += 1
        self.trained += ids
        self.ages += ages
        taken = self.updates - (self.attempts_at_training in self.short_steps)
        skipped = self.attempts_at_training in self.skip_steps or not taken
        self.learner_version += 0 if skipped else taken
        return StepReport(
            self.learner_version, skipped, 1.0, {"accuracy": 0.5, "effective_share": 1}
        )

    async def publish(self, root: Path, attempt: int) -> Receipt:
        await self._work("publish")
        version = PolicyVersion(attempt, self.learner_version)
        return Receipt(root / f"{attempt}-{version.step}", version, "a" * 64, Canary((), ()))

    async def save(self, folder: Path) -> dict[str, str]:
        await self._work("save")
        write_atomic(folder / "policy.safetensors", str(self.learner_version))
        return {"policy": str(self.learner_version)}

    async def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        self.learner_version = int((folder / "policy.safetensors").read_text())
        assert self.learner_version == steps_taken
        return {"policy": str(self.learner_version)}

    async def save_policy(self, out_dir: Path) -> str:
        return "p" * 64

    async def stop(self) -> None:
        self.stopped = True
