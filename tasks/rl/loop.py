"""The two coroutines: `produce` samples, `consume` trains; rules, not turns, keep them together.

Admission bounds how far generation runs ahead, consumption drops what became too old, and no sample
is drawn by an engine that has not proven the weights published to it.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from configs.schema.rl import RLConfig
from tasks.artifacts.progress import Reporter
from tasks.rl.buffer import RolloutBuffer
from tasks.rl.checkpoint import Checkpoints, Saved
from tasks.rl.controllers import linear_anneal
from tasks.rl.errors import CheckpointMismatchError, NothingToLearnError
from tasks.rl.grader import weigh
from tasks.rl.learner import StepReport
from tasks.rl.ledger import SampleFate, SlotClock, SlotState
from tasks.rl.loop_state import LoopState
from tasks.rl.reward_gate import RewardGate
from tasks.rl.rollout_worker import Harvest
from tasks.rl.runtime.types import Runtime
from tasks.rl.sentinel import Decision, SentinelTrippedError
from tasks.rl.staleness import capacity, staleness_steps
from tasks.rl.types import Group
from tasks.rl.weight_sync import Receipt

logger = logging.getLogger(__name__)
MAX_EMPTY_BATCHES = 20
"""Batches in a row without one solved problem before the run says so and stops."""


def slots_of(runtime: Runtime) -> list[str]:
    """Placement slots that cost money: one device in turns, or one each."""
    if runtime.shares_device:
        return ["device"]
    return ["learner", *(f"rollout-{i}" for i in range(runtime.workers))]


class AsyncLoop:
    """One attempt at `rl.steps` optimiser steps."""

    def __init__(
        self,
        config: RLConfig,
        runtime: Runtime,
        state: LoopState,
        checkpoints: Checkpoints,
        publish_root: Path,
        report: Reporter,
        gate: RewardGate | None = None,
    ) -> None:
        """Without a `gate` no batch is held against the reward suite."""
        self._config = config
        self._runtime = runtime
        self.state = state
        self._checkpoints = checkpoints
        self._publish_root = publish_root
        self._report = report
        self._gate = gate
        samples = config.buffer.capacity_batches * config.batch_size
        self._buffer = RolloutBuffer(samples, config.buffer.order)
        self._started_s = time.monotonic()
        clocks = {s: SlotClock(state.ledger, s, time.monotonic) for s in slots_of(runtime)}
        self._clocks = list(clocks.values())
        self._learner_clock = clocks.get("learner", self._clocks[0])
        self._rollout_clocks = self._clocks[-runtime.workers :]
        self._engine_step = [state.learner_version] * runtime.workers
        self._running = 0
        self._in_training = 0
        self._receipt: Receipt | None = None
        self._changed = asyncio.Condition()
        self._finished = asyncio.Event()

    async def run(self, saved: Saved | None) -> None:
        """Start both sides, go on from `saved` if there is one, and take every step."""
        self._started_s = time.monotonic()
        with self._everyone(SlotState.STARTUP):
            await self._runtime.start()
            if saved is not None:
                await self._load_learner(saved)
        with self._everyone(SlotState.SYNC):
            await self._publish()
            for worker in range(self._runtime.workers):
                await self._prove(worker)
        coroutines = [self.consume(), *(self.produce(i) for i in range(self._runtime.workers))]
        running = [asyncio.create_task(c) for c in coroutines]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            if self._gate is not None:
                self._gate.close()

    def wall_s(self) -> float:
        """Wall-clock of this attempt so far."""
        return time.monotonic() - self._started_s

    # -- the two coroutines ---------------------------------------------------------------------

    async def produce(self, worker: int) -> None:
        """Sample, grade and buffer groups, as many as the admission rule lets in."""
        clock = self._rollout_clocks[worker]
        while (admitted := await self._admit(worker)) > 0:
            with clock.state(SlotState.ROLLOUT):
                harvest = await self._play(worker, admitted)
            with clock.state(SlotState.GRADE):
                groups = await self._runtime.grade(worker, harvest.rollouts)
            async with self._changed:
                self._running -= admitted
                for group in groups:
                    self._drop(self._buffer.put(group))
                self._changed.notify_all()
        with self._waiting(clock):  # the slot is paid for until the learner is done
            await self._finished.wait()

    async def _play(self, worker: int, samples: int) -> Harvest:
        """Sample the next prompts with a worker, at the temperature of this step."""
        group = self._config.group_size
        tickets = self.state.queue.take(samples // group)
        temperature = linear_anneal(self._config.sampling.temperature, self.state.learner_version)
        started_s = time.monotonic()
        with self.state.meter.overlap.working("rollout"):
            harvest = await self._runtime.play(worker, tickets, group, temperature)
        self.state.meter.generated(harvest, time.monotonic() - started_s, temperature)
        return harvest

    async def consume(self) -> None:
        """Train on fresh batches, publish, checkpoint, until every step is taken."""
        clock = self._learner_clock
        while self.state.learner_version < self._config.steps:
            groups = await self._next_batch()
            self._hand_to_gate(groups)
            with clock.state(SlotState.GRADE):
                worth_training = await self._worth_training(groups)
            if not worth_training:
                await self._training(0)
                continue
            with clock.state(SlotState.TRAIN):
                with self.state.meter.overlap.working("train"):
                    report = await self._runtime.train(groups, self.state.kl_coefficient)
                metrics = self._account(groups, report)
            if self.state.interval.due(report.learner_version):
                with clock.state(SlotState.SYNC):
                    await self._publish()
            self.state.learner_version = report.learner_version
            await self._training(0)
            with clock.state(SlotState.GRADE):
                metrics |= await self._gated()
            with clock.state(SlotState.TRAIN):
                self._tell(metrics)  # before the checkpoint: a resumed run has the line or makes it
            if self._gate is not None:
                self._gate.enforce()
            due = self.state.learner_version % self._config.checkpoint_every == 0
            if due and not report.skipped:  # this step's checkpoint is never written twice
                with clock.state(SlotState.CHECKPOINT):
                    await self._checkpoint()
        self._finished.set()

    # -- admission, consumption -----------------------------------------------------------------

    async def _admit(self, worker: int) -> int:
        """Samples this worker may start now, in whole groups; 0 when the run is over."""
        group = self._config.group_size
        share = -(-self._config.batch_size // self._runtime.workers)
        most = max(group, share // group * group)
        while True:
            if self._newer(worker):
                with self._rollout_clocks[worker].state(SlotState.SYNC):
                    await self._prove(worker)
            if self.state.learner_version >= self._config.steps:
                return 0
            admitted = min(self._free(worker), most) // group * group
            if admitted:
                self._running += admitted
                return admitted
            with self._waiting(self._rollout_clocks[worker]):
                async with self._changed:
                    await self._changed.wait_for(lambda: self._may_move(worker))

    def _may_move(self, worker: int) -> bool:
        over = self.state.learner_version >= self._config.steps
        return self._newer(worker) or over or self._free(worker) >= self._config.group_size

    def _newer(self, worker: int) -> bool:
        """Whether weights are out that this worker does not hold yet."""
        return self._receipt is not None and self._receipt.version.step > self._engine_step[worker]

    def _free(self, worker: int) -> int:
        """Samples the admission rule still allows; a batch in training counts until its step ends,
        or one batch too many would start during every step."""
        lag = self.state.learner_version - self._engine_step[worker]
        waiting = self._buffer.samples + self._in_training
        batch = self._config.batch_size
        allowed = capacity(self._config.staleness_limit, lag, batch, self._running, waiting)
        still_needed = (self._config.steps - self.state.learner_version) * batch
        room = self._buffer.room(self._engine_step[worker], self._running)
        return min(allowed, room, still_needed - self._running - waiting)

    async def _training(self, samples: int) -> None:
        """Say how many samples are being trained on; whoever waits for capacity looks again."""
        async with self._changed:
            self._in_training = samples
            self._changed.notify_all()

    async def _next_batch(self) -> list[Group]:
        """The next batch; too old groups are dropped and their prompts reissued."""
        while True:
            enough_fresh = self._running == 0 or (
                self._buffer.fresh_share(self._config.batch_size, max(self._engine_step))
                >= self._config.buffer.fresh_share_floor
            )
            if enough_fresh:
                taken = self._buffer.take(
                    self._config.batch_size,
                    self.state.learner_version,
                    self._config.staleness_limit,
                )
                self._drop(taken.dropped)
                if taken.dropped or taken.groups:
                    await self._training(self._config.batch_size if taken.groups else 0)
                if taken.groups:
                    with self._learner_clock.state(SlotState.GRADE):
                        return self._weighed(taken.groups)
            with self._waiting(self._learner_clock):
                async with self._changed:
                    await self._changed.wait()

    def _weighed(self, groups: Sequence[Group]) -> list[Group]:
        return [
            Group(
                g.group_id,
                g.row_id,
                tuple(weigh(g.rollouts, self._config.reward, self.state.learner_version)),
            )
            for g in groups
        ]

    def _drop(self, groups: Sequence[Group]) -> None:
        """Give back capacity and prompts of groups that will not be trained on."""
        if groups:
            self.state.queue.reissue(int(g.group_id) for g in groups)
            self.state.ledger.count(SampleFate.DROPPED, sum(len(g.rollouts) for g in groups))

    async def _worth_training(self, groups: Sequence[Group]) -> bool:
        """Ask the sentinel; a suspicious batch makes the grader answer known-answer probes.

        Raises:
            SentinelTrippedError: the grader failed a probe. The last checkpoint is intact.
            NothingToLearnError: too many batches in a row without a solved problem.
        """
        suspicion = self.state.sentinel.observe([r.outcome for g in groups for r in g.rollouts])
        if suspicion is None:
            return True
        probes = await self._runtime.probe(0)
        decision = self.state.sentinel.judge(suspicion, probes)
        self.state.meter.suspicions += 1
        logger.warning("%s: %s → %s", suspicion.kind.value, suspicion.detail, decision.value)
        if decision is Decision.TRIP:
            raise SentinelTrippedError([p.probe_id for p in probes if not p.passed])
        if decision is Decision.TRAIN:
            return True
        self.state.queue.consumed(int(g.group_id) for g in groups)
        self.state.ledger.count(SampleFate.FILTERED, sum(len(g.rollouts) for g in groups))
        if self.state.sentinel.consecutive_drops >= MAX_EMPTY_BATCHES:
            raise NothingToLearnError(
                f"{MAX_EMPTY_BATCHES} batches in a row had no solved problem: choose easier bands "
                "(data.rl_bands), a larger rl.group_size, or more SFT (sft.steps)"
            )
        return False

    def _hand_to_gate(self, groups: Sequence[Group]) -> None:
        """Have the batch judged beside the step that may train on it."""
        if self._gate is not None:
            samples = [r for g in groups for r in g.rollouts]
            names = [r.rollout.rollout_id for r in samples]
            self._gate.submit(self.state.learner_version + 1, [r.outcome for r in samples], names)

    async def _gated(self) -> dict[str, float]:
        """The verdicts on the batches since the last step; others go on working meanwhile."""
        return {} if self._gate is None else await asyncio.to_thread(self._gate.settle)

    # -- control, publish, checkpoint -----------------------------------------------------------

    def _account(self, groups: Sequence[Group], report: StepReport) -> dict[str, float]:
        """Close the batch's tickets, book what the step was worth; returns its metrics."""
        ages = [staleness_steps(g.oldest_step, self.state.learner_version) for g in groups]
        self.state.queue.consumed(int(g.group_id) for g in groups)
        self.state.trained.append((report.learner_version, [g.row_id for g in groups]))
        self.state.ledger.count(SampleFate.TRAINED, self._config.batch_size)
        self.state.ledger.add_effective(report.effective_samples)
        metrics = self.state.meter.trained(groups, ages, report)
        self._control(metrics, report.learner_version)
        return metrics

    def _control(self, metrics: dict[str, float], step: int) -> None:
        """Let the controllers see the step; adds what they set to its metrics."""
        metrics["kl_coefficient"] = self.state.kl_coefficient
        if self.state.kl and "kl_k1_mean" in metrics:
            self.state.kl.update(metrics["kl_k1_mean"], step)
        advice = self.state.alarm.observe(step, metrics.get("weight_max", 1.0))
        if advice:
            logger.warning(
                "step %d: largest importance weight %.1f is above %.0f; remedy: %s",
                step,
                advice.largest_weight,
                advice.threshold,
                advice.remedy.value,
            )

    async def _publish(self) -> None:
        self._receipt = await self._runtime.publish(self._publish_root, self.state.attempt)
        self.state.interval.published(self._receipt.version.step)

    async def _prove(self, worker: int) -> None:
        """Give a worker the newest weights; it samples with them only once they are proven."""
        receipt = self._receipt
        assert receipt is not None
        self.state.meter.proven(await self._runtime.sync(worker, receipt))
        async with self._changed:
            self._engine_step[worker] = receipt.version.step
            self._changed.notify_all()

    async def _checkpoint(self) -> None:
        for clock in self._clocks:
            clock.flush()
        await self._checkpoints.write(
            self.state.learner_version,
            self.state.attempt,
            self.state.state_dict(self.wall_s()),
            self._runtime.save,
        )

    async def _load_learner(self, saved: Saved) -> None:
        found = await self._runtime.load(saved.folder, saved.step)
        if dict(found) != dict(saved.learner):
            raise CheckpointMismatchError(
                f"{saved.folder}: the learner's tensors differ from the manifest after loading; "
                "move the folder away to start RL anew"
            )

    def _tell(self, metrics: Mapping[str, float]) -> None:
        step = self.state.learner_version
        self._report.metrics(step, metrics)
        self._report.progress(
            step,
            self._config.steps,
            f"accuracy {metrics['accuracy']:.2f}  lag {metrics['staleness_mean']:.1f}  "
            f"effective {metrics['effective_share']:.0%}  KL {metrics.get('kl_k1_mean', 0.0):.3f}",
        )

    # -- clocks ---------------------------------------------------------------------------------

    def _waiting(self, clock: SlotClock) -> AbstractContextManager[None]:
        """Idle time of one slot; a shared device is never idle while the other side works."""
        if self._runtime.shares_device:
            return nullcontext()
        return clock.state(SlotState.IDLE)

    def _everyone(self, state: SlotState) -> ExitStack:
        stack = ExitStack()
        for clock in self._clocks:
            stack.enter_context(clock.state(state))
        return stack
