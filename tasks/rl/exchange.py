"""What generator and learner share: finished groups, counts, the newest weights, and one bell.

Whoever changes something here rings; whoever waits looks again. Both sides say what they wait for,
and the watchdog knows who waits for whom.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from configs.schema.rl import RLConfig
from configs.schema.rl_runtimes import RayRuntime
from tasks.rl.buffer import RolloutBuffer
from tasks.rl.errors import RefillLimitError, TooManyWorkersLostError
from tasks.rl.ledger import SampleFate, SlotClock, SlotState
from tasks.rl.loop_state import LoopState
from tasks.rl.runtime.types import Runtime
from tasks.rl.staleness import capacity
from tasks.rl.types import Group
from tasks.rl.watchdog import Watchdog
from tasks.rl.weight_sync import Receipt

logger = logging.getLogger(__name__)
LEARNER = "learner"
REMEDIES = {
    SampleFate.FILTERED: "Nearly every prompt is solved always or never: choose other bands "
    "(data.rl_bands), a larger rl.group_size, or rl.filter=none",
    SampleFate.REFUSED: "The engine's answers cannot be trained on; the log says why for each. "
    "Check the engine and its version, or use rl.engine.type=transformers",
}


def slots_of(runtime: Runtime) -> list[str]:
    """Placement slots that cost money: one device in turns, or one each."""
    if runtime.shares_device:
        return ["device"]
    return [LEARNER, *(rollout_name(i) for i in range(runtime.workers))]


def rollout_name(worker: int) -> str:
    """What a rollout worker is called in the books and by the watchdog."""
    return f"rollout-{worker}"


class Seat:
    """One rollout worker as the loop sees it; whoever sits here may be replaced."""

    def __init__(self, worker: int, clock: SlotClock) -> None:
        self.worker = worker
        self.clock = clock
        self.running = 0
        """Samples it was given and has not handed in."""
        self.proven_step: int | None = None
        """Policy step it has proven to hold; None = nothing yet: nothing may be drawn from it."""
        self.last_sign_s = 0.0
        """When it last finished anything."""
        self.lost: asyncio.Future[str]
        """Done once whoever sits here is lost; its result is the reason."""

    def fill(self) -> None:
        """Somebody new sits here, with nothing proven; needs a running event loop."""
        self.proven_step = None
        self.lost = asyncio.get_running_loop().create_future()

    def has_proven(self, step: int) -> bool:
        """Whether it holds the weights of a policy step, or newer ones, and showed it."""
        return self.proven_step is not None and self.proven_step >= step

    @property
    def name(self) -> str:
        """What the watchdog calls it."""
        return rollout_name(self.worker)


class Exchange:
    """State of one attempt that both sides read and change; single-threaded."""

    def __init__(
        self, config: RLConfig, runtime: Runtime, state: LoopState, watchdog: Watchdog
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.state = state
        self.watchdog = watchdog
        samples = config.buffer.capacity_batches * config.batch_size
        self.buffer = RolloutBuffer(samples, config.buffer.order)
        self.in_training = 0
        """Samples of the batch being trained on."""
        self.thrown_away: Counter[SampleFate] = Counter()
        """Samples filtered and refused since the last batch."""
        self.handed_in = 0
        """Plays that ended, with groups or without."""
        self.receipt: Receipt | None = None
        """The newest publish."""
        self.over = False
        """Every step is taken."""
        clocks = {s: SlotClock(state.ledger, s, time.monotonic) for s in slots_of(runtime)}
        self.clocks = list(clocks.values())
        self.learner_clock = clocks.get(LEARNER, self.clocks[0])
        rollout_clocks = self.clocks[-runtime.workers :]
        self.seats = [Seat(i, clock) for i, clock in enumerate(rollout_clocks)]
        self._bell = asyncio.Condition()
        self._booked = (0.0, 0.0)
        self.started_s = time.monotonic()

    def wall_s(self) -> float:
        """Wall-clock of this attempt so far."""
        return time.monotonic() - self.started_s

    def utilisation(self) -> float:
        """Share of the slots' time since the last call that was not idle; 1 where none passed."""
        for clock in self.clocks:
            clock.flush()
        seconds = self.state.ledger.seconds_by_state()
        total, idle = sum(seconds.values()), seconds.get(SlotState.IDLE, 0.0)
        (before, idle_before), self._booked = self._booked, (total, idle)
        return 1 - (idle - idle_before) / (total - before) if total > before else 1.0

    # -- waiting --------------------------------------------------------------------------------

    async def ring(self) -> None:
        """Say that something changed."""
        async with self._bell:
            self._bell.notify_all()

    async def until(
        self,
        holds: Callable[[], bool],
        who: str,
        for_what: str,
        of: Sequence[str],
        clock: SlotClock | None = None,
    ) -> None:
        """Wait until something holds; the slot of `clock` is idle meanwhile.

        A shared device is never idle: the other side works on it.
        """
        if holds():
            return
        with ExitStack() as stack:
            if clock is not None and not self.runtime.shares_device:
                stack.enter_context(clock.state(SlotState.IDLE))
            stack.enter_context(self.watchdog.waiting(who, for_what, of))
            async with self._bell:
                await self._bell.wait_for(holds)

    @contextmanager
    def everyone(self, state: SlotState) -> Iterator[None]:
        """Every slot does the same thing inside the block."""
        with ExitStack() as stack:
            for clock in self.clocks:
                stack.enter_context(clock.state(state))
            yield

    # -- admission ------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Samples admitted and not handed in."""
        return sum(seat.running for seat in self.seats)

    @property
    def newest_step(self) -> int:
        """Policy step of the newest weights any worker has proven."""
        return max(-1 if s.proven_step is None else s.proven_step for s in self.seats)

    @property
    def able_seat(self) -> Seat | None:
        """A worker that is there; None where each is lost and waits for its replacement."""
        return next((s for s in self.seats if not s.lost.done()), None)

    def lose(self, seat: Seat, lost: "asyncio.Future[str]", reason: str) -> None:
        """Note that who sat at `seat` when `lost` was pending is gone; said once of each.

        Raises:
            TooManyWorkersLostError: the run has lost more than it may.
        """
        if lost.done():
            return
        meter, runtime = self.state.meter, self.config.runtime
        meter.count("worker_losses")
        most = runtime.max_worker_losses if isinstance(runtime, RayRuntime) else 0
        if meter.counts["worker_losses"] > most:
            raise TooManyWorkersLostError(
                f"rl.runtime.max_worker_losses={most}: {meter.counts['worker_losses']} rollout "
                f"workers were lost, the last because: {reason}. The last checkpoint is whole: run "
                "again to go on from it, or raise the limit"
            )
        lost.set_result(reason)
        logger.warning("%s is lost (%s); a replacement starts", seat.name, reason)

    def newer_than(self, seat: Seat) -> bool:
        """Whether weights are out that a seat has not proven yet."""
        return self.receipt is not None and not seat.has_proven(self.receipt.version.step)

    def free(self, seat: Seat) -> int:
        """Samples a seat may start now, in whole groups.

        The admission rule and the ring bound all seats together; what they leave is shared evenly
        between those that may sample. A batch in training counts until its step ends, or one batch
        too many would start during every step.
        """
        if seat.proven_step is None or seat.lost.done():
            return 0
        config, learner_version = self.config, self.state.learner_version
        batch, updates = config.batch_size, config.updates_per_batch
        running, waiting = self.running, self.buffer.samples + self.in_training
        lag = learner_version - seat.proven_step
        limit = self.state.alarm.admission_limit(config.staleness_limit, lag)
        allowed = capacity(limit, lag, batch, running, waiting, updates)
        batches_left = -(-(config.steps - learner_version) // updates)
        still_needed = batches_left * batch - running - waiting
        allowed = min(allowed, self.buffer.room(seat.proven_step, running), still_needed)
        able = sum(s.proven_step is not None and not s.lost.done() for s in self.seats)
        group = config.group_size
        groups_each = -(-(running + allowed) // (able * group))
        return max(0, min(allowed, groups_each * group - seat.running)) // group * group

    # -- ends of samples ------------------------------------------------------------------------

    def drop(self, groups: Sequence[Group]) -> None:
        """Give back capacity and prompts of groups that will not be trained on."""
        if groups:
            self.state.queue.reissue(int(g.group_id) for g in groups)
            self.state.ledger.count(SampleFate.DROPPED, sum(len(g.rollouts) for g in groups))

    def throw_away(self, fate: SampleFate, samples: int) -> None:
        """Book samples no batch will hold; others are sampled in their place, within bounds.

        Raises:
            RefillLimitError: more than `rl.max_refill_factor` batches of them for one step.
        """
        self.state.ledger.count(fate, samples)
        self.thrown_away[fate] += samples
        config = self.config
        if self.thrown_away[fate] > config.max_refill_factor * config.batch_size:
            raise RefillLimitError(
                f"{self.thrown_away[fate]} samples were {fate.value} for one step, more than "
                f"rl.max_refill_factor={config.max_refill_factor:g} batches of "
                f"rl.batch_size={config.batch_size}. {REMEDIES[fate]}"
            )
