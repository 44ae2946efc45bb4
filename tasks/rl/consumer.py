"""The learner's side: take a fresh batch, train, publish, keep, until every step is taken."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tasks.artifacts.progress import Reporter
from tasks.rl.checkpoint import Checkpoints
from tasks.rl.errors import NothingToLearnError, WorkerLostError
from tasks.rl.exchange import LEARNER, Exchange
from tasks.rl.grader import weigh
from tasks.rl.learner import StepReport
from tasks.rl.ledger import SampleFate, SlotState
from tasks.rl.loop_state import TrainedBatch
from tasks.rl.reward_gate import RewardGate
from tasks.rl.sample_log import SampleLog, TrainedSamples, credited
from tasks.rl.sentinel import Decision, ProbeResult, SentinelTrippedError
from tasks.rl.staleness import fresh_lr_scale, staleness_steps
from tasks.rl.types import Group

logger = logging.getLogger(__name__)
MAX_EMPTY_BATCHES = 20
"""Batches in a row without one solved problem before the run says so and stops."""


class Consumer:
    """Trains on what the exchange holds."""

    def __init__(
        self,
        exchange: Exchange,
        checkpoints: Checkpoints,
        publish_root: Path,
        report: Reporter,
        gate: RewardGate | None,
        samples: SampleLog | None,
    ) -> None:
        self._exchange = exchange
        self._config = exchange.config
        self._runtime = exchange.runtime
        self._state = exchange.state
        self._checkpoints = checkpoints
        self._publish_root = publish_root
        self._report = report
        self._gate = gate
        self._samples = samples

    async def run(self) -> None:
        """Train on fresh batches until every step is taken."""
        state, clock = self._state, self._exchange.learner_clock
        while state.learner_version < self._config.steps:
            groups = await self._next_batch()
            self._hand_to_gate(groups)
            with clock.state(SlotState.GRADE):
                worth_training = await self._worth_training(groups)
            if worth_training:
                await self._step(groups)
            else:
                await self._training(0)
        self._exchange.over = True
        await self._exchange.ring()

    async def _step(self, groups: Sequence[Group]) -> None:
        """One batch: train, publish where it is due, tell, keep."""
        state, clock = self._state, self._exchange.learner_clock
        before = state.learner_version
        with clock.state(SlotState.TRAIN):
            keeping = asyncio.create_task(self._keep(groups))
            report = await self._train(groups)
            await keeping
            metrics = self._account(groups, report)
        over = report.learner_version >= self._config.steps
        if state.interval.due(report.learner_version, state.alarm.publish_divisor) or over:
            with clock.state(SlotState.SYNC):
                await self.publish()
        state.learner_version = report.learner_version
        await self._training(0)
        with clock.state(SlotState.GRADE):
            metrics |= await self._gated()
        with clock.state(SlotState.TRAIN):
            self._tell(metrics)  # before the checkpoint: a resumed run has the line or makes it
        if self._gate is not None:
            self._gate.enforce()
        every = self._config.checkpoint_every
        if state.learner_version // every > before // every:
            with clock.state(SlotState.CHECKPOINT):
                await self._checkpoint()

    async def _keep(self, groups: Sequence[Group]) -> None:
        """Write down what is trained on, beside the step."""
        log, state, config = self._samples, self._state, self._config
        if log is None:
            return
        batch, began_at = len(state.trained), state.learner_version

        def write() -> None:
            kept = TrainedSamples(began_at, tuple(groups), credited(groups, config))
            log.write(batch, kept)

        await asyncio.to_thread(write)

    async def _train(self, groups: Sequence[Group]) -> StepReport:
        exchange, state = self._exchange, self._state
        scale = 1.0
        if self._config.buffer.when_stale == "lower_lr":
            fresh = sum(g.size for g in groups if g.oldest_step >= exchange.newest_step)
            share = fresh / self._config.batch_size
            scale = fresh_lr_scale(share, self._config.buffer.fresh_share_floor)
        with state.meter.overlap.working("train"), exchange.watchdog.waiting(LEARNER, "a step"):
            tightness = state.alarm.tightness
            return await self._runtime.train(groups, state.kl_coefficient, scale, tightness)

    # -- the next batch -------------------------------------------------------------------------

    async def _next_batch(self) -> list[Group]:
        """The next batch; too old groups are dropped and their prompts reissued."""
        exchange = self._exchange
        while True:
            handed_in = exchange.handed_in
            if groups := await self._taken():
                break
            await exchange.until(
                lambda: exchange.handed_in != handed_in,  # noqa: B023 (awaited here)
                LEARNER, "samples", [s.name for s in exchange.seats], exchange.learner_clock,
            )  # fmt: skip
        exchange.thrown_away.clear()
        with exchange.learner_clock.state(SlotState.GRADE):
            return self._weighed(groups)

    async def _taken(self) -> Sequence[Group]:
        """A batch, if there is one and it is fresh enough; what is too old goes first."""
        exchange, config = self._exchange, self._config
        version, limit = self._state.learner_version, config.staleness_limit
        dropped = exchange.buffer.evict(version, limit)
        groups: tuple[Group, ...] = ()
        if not self._pauses():
            groups = exchange.buffer.take(config.batch_size, version, limit).groups
        exchange.drop(dropped)
        if dropped or groups:
            await self._training(config.batch_size if groups else 0)
        return groups

    def _pauses(self) -> bool:
        """Whether to wait for fresher samples; never for ones that are not on their way."""
        config, exchange = self._config, self._exchange
        fresh = exchange.buffer.fresh_share(config.batch_size, exchange.newest_step)
        return (
            config.buffer.when_stale == "pause"
            and exchange.running > 0
            and fresh < config.buffer.fresh_share_floor
        )

    def _weighed(self, groups: Sequence[Group]) -> list[Group]:
        step, reward = self._state.learner_version, self._config.reward
        return [replace(g, rollouts=tuple(weigh(g.rollouts, reward, step))) for g in groups]

    async def _worth_training(self, groups: Sequence[Group]) -> bool:
        """Ask the sentinel; a suspicious batch makes the grader answer known-answer probes.

        Raises:
            SentinelTrippedError: the grader failed a probe. The last checkpoint is intact.
            NothingToLearnError: too many batches in a row without a solved problem.
        """
        suspicion = self._state.sentinel.observe([r.outcome for g in groups for r in g.rollouts])
        if suspicion is None:
            return True
        probes = await self._probes()
        decision = self._state.sentinel.judge(suspicion, probes)
        self._state.meter.count("suspicions")
        logger.warning("%s: %s → %s", suspicion.kind.value, suspicion.detail, decision.value)
        if decision is Decision.TRIP:
            raise SentinelTrippedError([p.probe_id for p in probes if not p.passed])
        if decision is Decision.TRAIN:
            return True
        self._state.queue.consumed(int(g.group_id) for g in groups)
        self._state.ledger.count(SampleFate.FILTERED, sum(len(g.rollouts) for g in groups))
        if self._state.sentinel.consecutive_drops >= MAX_EMPTY_BATCHES:
            raise NothingToLearnError(
                f"{MAX_EMPTY_BATCHES} batches in a row had no solved problem: choose easier bands "
                "(data.rl_bands), a larger rl.group_size, or more SFT (sft.steps)"
            )
        return False

    async def _probes(self) -> list[ProbeResult]:
        """Have a worker that is there answer probes, another where that one dies over it."""
        exchange = self._exchange
        while True:
            names = [s.name for s in exchange.seats]
            await exchange.until(
                lambda: exchange.able_seat is not None, LEARNER, "a worker to probe", names
            )
            seat = exchange.able_seat
            assert seat is not None
            lost = seat.lost
            try:
                return await self._runtime.probe(seat.worker)
            except WorkerLostError as error:
                exchange.lose(seat, lost, error.reason)
                await exchange.ring()

    def _hand_to_gate(self, groups: Sequence[Group]) -> None:
        """Have the batch judged beside the step that may train on it."""
        if self._gate is not None:
            samples = [r for g in groups for r in g.rollouts]
            names = [r.rollout.rollout_id for r in samples]
            self._gate.submit(self._state.learner_version + 1, [r.outcome for r in samples], names)

    async def _gated(self) -> dict[str, float]:
        """The verdicts on the batches since the last step; others go on working meanwhile."""
        return {} if self._gate is None else await asyncio.to_thread(self._gate.settle)

    # -- control, publish, checkpoint -----------------------------------------------------------

    def _account(self, groups: Sequence[Group], report: StepReport) -> dict[str, float]:
        """Close the batch's tickets, book what the step was worth; returns its metrics."""
        ages = [staleness_steps(g.oldest_step, self._state.learner_version) for g in groups]
        self._state.queue.consumed(int(g.group_id) for g in groups)
        self._state.trained.append(
            TrainedBatch(
                report.learner_version,
                [g.row_id for g in groups],
                [int(g.group_id) for g in groups],
            )
        )
        self._state.ledger.count(SampleFate.TRAINED, sum(len(g.rollouts) for g in groups))
        self._state.ledger.add_effective(report.effective_samples)
        metrics = self._state.meter.trained(groups, ages, report)
        self._control(metrics, report.learner_version)
        return metrics

    def _control(self, metrics: dict[str, float], step: int) -> None:
        """Let the controllers see the step; adds what they set to its metrics."""
        metrics["kl_coefficient"] = self._state.kl_coefficient
        metrics["utilisation"] = self._exchange.utilisation()
        diverged = self._state.divergence.observe(
            metrics["utilisation"], metrics.get("effective_share", 0.0)
        )
        if diverged is not None:
            self._state.meter.count("divergences")
            logger.warning("step %d: %s", step, diverged)
        if self._state.kl and "kl_k1_mean" in metrics:
            self._state.kl.update(metrics["kl_k1_mean"], step)
        advice = self._state.alarm.observe(step, metrics.get("weight_max", 1.0))
        if advice:
            logger.warning(
                "step %d: largest importance weight %.1f is above %.0f; remedy: %s (%s)",
                step,
                advice.largest_weight,
                advice.threshold,
                advice.remedy.value,
                "applied" if advice.applied else "only said: see rl.weight_alarm",
            )

    async def publish(self) -> None:
        """Write the learner's weights; whoever samples sees them at the next ring."""
        exchange = self._exchange
        with exchange.watchdog.waiting(LEARNER, "a publish"):
            receipt = await self._runtime.publish(self._publish_root, self._state.attempt)
        exchange.receipt = receipt
        self._state.interval.published(receipt.version.step)

    async def _checkpoint(self) -> None:
        for clock in self._exchange.clocks:
            clock.flush()
        with self._exchange.watchdog.waiting(LEARNER, "a checkpoint"):
            buffered = self._exchange.buffer.groups
            await self._checkpoints.write(
                self._state.learner_version,
                self._state.attempt,
                self._state.state_dict(self._exchange.wall_s(), buffered),
                buffered,
                self._runtime.save,
            )

    def _tell(self, metrics: Mapping[str, float]) -> None:
        step = self._state.learner_version
        self._report.metrics(step, metrics)
        kl = f"  KL {metrics['kl_k1_mean']:.3f}" if "kl_k1_mean" in metrics else ""
        self._report.progress(
            step,
            self._config.steps,
            f"accuracy {metrics['accuracy']:.2f}  lag {metrics['staleness_mean']:.1f}  "
            f"effective {metrics['effective_share']:.0%}{kl}",
        )

    async def _training(self, samples: int) -> None:
        """Say how many samples are being trained on; whoever waits for capacity looks again."""
        self._exchange.in_training = samples
        await self._exchange.ring()
