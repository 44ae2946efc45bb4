"""A discrete-event model of the loop: the loop's own rules, with modelled time instead of work.

Admission, age, ring and publish interval are those of `staleness`, `buffer` and `controllers`, not
copies; sampling, tools, training and publishing take the seconds they are said to take. So it
answers in milliseconds what a run would take hours to show: whether a setting can stand still, how
old samples get, how fast it goes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tasks.rl.buffer import RolloutBuffer
from tasks.rl.controllers import PublishInterval
from tasks.rl.simulated_engines import Clock, Tools, engine
from tasks.rl.simulated_work import Modelled, Times, Work
from tasks.rl.staleness import capacity, staleness_steps
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn

MAX_EVENTS_PER_SAMPLE = 10_000
"""Events without a step, per sample of a batch, before the model says it goes round in circles."""


class DeadlockError(RuntimeError):
    """Nothing will ever happen again, and steps are left; says who waits for what."""


class NoProgressError(RuntimeError):
    """Samples come and go and no batch ever fills."""


@dataclass
class _Play:
    """Samples that hand in their groups together: one group, or in lockstep all there are."""

    worker: int
    in_lockstep: bool
    oldest_step: int | None = None
    """Of the policy that sampled its first token."""
    newest_step: int = 0
    samples_left: dict[int, int] = field(default_factory=dict)
    """By group."""
    turns_out: int = 0
    at_barrier: list["_Sample"] = field(default_factory=list)


@dataclass
class _Sample:
    play: _Play
    group: int
    turns_left: int


class ModelledLoop:
    """One run; `run` gives its outcome. Same work, times and seed: same outcome."""

    def __init__(
        self,
        work: Work,
        times: Times,
        workers: int = 1,
        *,
        lockstep: bool = False,
        one_device: bool = False,
        seed: int = 0,
    ) -> None:
        """Model a loop.

        Args:
            lockstep: a worker plays a batch at a time, which is handed in as a whole; an engine
                that samples in batches takes it turn by turn, all waiting for the slowest tool.
            one_device: generator and learner never work at once.
        """
        self._work, self._times, self._lockstep = work, times, lockstep
        self._barrier = lockstep and not times.decode.continuous
        self._one_device = one_device
        self._rng = random.Random(seed)
        self._clock = Clock()
        self._engines = [engine(self._clock, times.decode, self) for _ in range(workers)]
        self._tools = Tools(self._clock, work.tool_latency, work.tool_concurrency, self._rng)
        self._buffer = RolloutBuffer(work.capacity_batches * work.batch_size, work.order)
        self._interval = PublishInterval(work.publish)
        self._version = self._published = 0
        self._loaded_step = [0] * workers
        self._proven_step = [0] * workers
        self._proving = [False] * workers
        self._unproven: list[tuple[_Play, list[int]]] = []
        self._load = [0] * workers
        self._running = self._in_training = 0
        self._learner_busy = self._training = False
        self._changed = True
        self._groups = 0
        self._ends: list[float] = []
        self._ages: list[int] = []
        self._sums = dict.fromkeys(("rollout", "busy", "train", "sync", "both"), 0.0)
        self._dropped = self._filtered = self._max_running = 0

    def run(self) -> Modelled:
        """Take every step.

        Raises:
            DeadlockError: both sides wait for each other.
            NoProgressError: no batch ever fills.
        """
        self._settle()
        events, seen_at = 0, 0
        while self._version < self._work.steps or self._learner_busy:
            event = self._clock.next()
            if event is None:
                raise DeadlockError(self._who_waits())
            when, then = event
            self._pass(when - self._clock.now)
            self._clock.now = when
            steps = len(self._ends)
            then()
            self._settle()
            events += 1
            if len(self._ends) > steps:
                seen_at = events
            elif events - seen_at > MAX_EVENTS_PER_SAMPLE * self._work.batch_size:
                raise NoProgressError(f"no step in {events - seen_at} events; {self._who_waits()}")
        sums = self._sums
        return Modelled(
            self._clock.now, tuple(self._ends), tuple(self._ages), self._dropped, self._filtered,
            sums["rollout"], sums["busy"], sums["train"], sums["sync"], sums["both"],
            self._max_running,
        )  # fmt: skip

    def _pass(self, seconds: float) -> None:
        """Book time that goes by in the present state."""
        playing = sum(load > 0 for load in self._load)
        self._sums["rollout"] += seconds * playing
        busy = sum(a > 0 or b for a, b in zip(self._load, self._proving, strict=True))
        self._sums["busy"] += seconds * busy
        self._sums["train"] += seconds * self._training
        self._sums["sync"] += seconds * (
            sum(self._proving) + (self._learner_busy and not self._training)
        )
        self._sums["both"] += seconds * (playing > 0 and self._training)

    def _settle(self) -> None:
        """Let both sides do what the rules now allow; a turn that ends changes nothing for them."""
        if self._changed:
            self._changed = False
            self._consume()
            for worker in sorted(range(len(self._load)), key=lambda w: self._load[w]):
                self._produce(worker)
        for each in self._engines:
            each.kick()

    # -- generation -----------------------------------------------------------------------------

    def _produce(self, worker: int) -> None:
        if self._proving[worker] or (self._one_device and self._learner_busy):
            return
        if self._published > self._proven_step[worker]:
            self._proving[worker] = True
            step = self._published
            self._engines[worker].prove(
                self._times.prove_s,
                lambda: self._loaded(worker, step),
                lambda: self._proven(worker, step),
            )
            return
        work = self._work
        if self._lockstep and self._load[worker]:
            return
        free = self._free(worker)
        each = -(-(self._running + free) // (len(self._load) * work.group_size)) * work.group_size
        groups = max(0, min(free, each - self._load[worker])) // work.group_size
        at_once = work.batch_size // work.group_size
        for count in [min(groups, at_once)] if self._lockstep and groups else [1] * groups:
            self._start(worker, count)

    def _loaded(self, worker: int, step: int) -> None:
        self._loaded_step[worker] = step

    def _proven(self, worker: int, step: int) -> None:
        self._proving[worker] = False
        self._proven_step[worker] = step
        self._changed = True
        waiting, self._unproven = self._unproven, []
        for play, groups in waiting:
            self._harvest(play, groups)

    def _free(self, worker: int) -> int:
        lag = self._version - self._proven_step[worker]
        waiting = self._buffer.samples + self._in_training
        work = self._work
        updates = work.updates_per_batch
        allowed = capacity(
            work.staleness_limit, lag, work.batch_size, self._running, waiting, updates
        )
        needed = -(-(work.steps - self._version) // updates) * work.batch_size
        room = self._buffer.room(self._proven_step[worker], self._running)
        return min(allowed, room, needed - self._running - waiting)

    def _start(self, worker: int, groups: int) -> None:
        play = _Play(worker, self._lockstep)
        samples = []
        for _ in range(groups):
            self._groups += 1
            play.samples_left[self._groups] = self._work.group_size
            samples += [
                _Sample(play, self._groups, self._turns()) for _ in range(self._work.group_size)
            ]
        self._load[worker] += len(samples)
        self._running += len(samples)
        self._max_running = max(self._max_running, self._running)
        self._submit(samples)

    def _turns(self) -> int:
        whole = int(self._work.turns_mean)
        return max(1, whole + (self._rng.random() < self._work.turns_mean - whole))

    def _submit(self, samples: list[_Sample]) -> None:
        play = samples[0].play
        play.turns_out += len(samples)
        turns = [(self._work.tokens.draw(self._rng), sample) for sample in samples]
        self._engines[play.worker].submit(turns)

    def turn_begins(self, what: _Sample) -> None:
        """An engine samples its first token, from the weights it holds by now."""
        play = what.play
        play.newest_step = self._loaded_step[play.worker]
        if play.oldest_step is None:
            play.oldest_step = play.newest_step

    def turn_over(self, what: _Sample) -> None:
        """An engine has sampled a turn: a tool is called, or the sample is done."""
        sample = what
        sample.turns_left -= 1
        if sample.turns_left:
            self._tools.call(lambda: self._answered(sample))
            return
        sample.play.turns_out -= 1
        sample.play.samples_left[sample.group] -= 1
        self._next_turn_or_end(sample.play, sample.group)

    def _answered(self, sample: _Sample) -> None:
        play = sample.play
        play.turns_out -= 1
        if not self._barrier:
            self._submit([sample])
            return
        play.at_barrier.append(sample)
        self._next_turn_or_end(play, sample.group)

    def _next_turn_or_end(self, play: _Play, group: int) -> None:
        """Groups end one by one; in lockstep all go on together, and end together."""
        if not play.in_lockstep:
            if not play.samples_left[group]:
                self._graded_later(play, [group])
        elif not play.turns_out and play.at_barrier:
            samples, play.at_barrier = play.at_barrier, []
            self._submit(samples)
        elif not play.turns_out:
            self._graded_later(play, list(play.samples_left))

    def _graded_later(self, play: _Play, groups: list[int]) -> None:
        seconds = self._times.grade_s * len(groups) * self._work.group_size
        self._after(seconds, lambda: self._harvest(play, groups))

    def _harvest(self, play: _Play, groups: list[int]) -> None:
        """Hand groups in, once the weights that sampled them are proven."""
        if play.newest_step > self._proven_step[play.worker]:
            self._unproven.append((play, groups))
            return
        assert play.oldest_step is not None  # every turn of it has begun
        self._changed = True
        for number in groups:
            self._running -= self._work.group_size
            self._load[play.worker] -= self._work.group_size
            if self._rng.random() < self._work.filter_share:
                self._filtered += self._work.group_size
            else:
                made = _group(number, play.oldest_step, self._work.group_size)
                self._dropped += sum(len(g.rollouts) for g in self._buffer.put(made))

    # -- training -------------------------------------------------------------------------------

    def _consume(self) -> None:
        if self._learner_busy or self._version >= self._work.steps:
            return
        if self._one_device and (self._running or any(self._proving)):
            return
        work = self._work
        newest = max(self._proven_step)
        fresh = self._buffer.fresh_share(work.batch_size, newest) >= work.fresh_share_floor
        if self._running and not fresh:
            return
        taken = self._buffer.take(work.batch_size, self._version, work.staleness_limit)
        self._dropped += sum(len(g.rollouts) for g in taken.dropped)
        if not taken.groups:
            return
        self._ages += [staleness_steps(g.oldest_step, self._version) for g in taken.groups]
        self._in_training = work.batch_size
        self._learner_busy = self._training = True
        self._after(self._times.train_s, self._trained)

    def _trained(self) -> None:
        self._training = False
        step = min(self._work.steps, self._version + self._work.updates_per_batch)
        if self._interval.due(step):
            self._interval.published(step)
            self._after(self._times.publish_s, lambda: self._step_over(step, published=True))
        else:
            self._step_over(step, published=False)

    def _step_over(self, step: int, *, published: bool) -> None:
        if published:
            self._published = step
        self._version = step
        self._in_training = 0
        self._changed = True
        due = step % self._work.checkpoint_every < self._work.updates_per_batch
        self._after(self._times.checkpoint_s if due else 0.0, self._ready)

    def _ready(self) -> None:
        self._learner_busy = False
        self._changed = True
        self._ends.append(self._clock.now)

    # -- shared ---------------------------------------------------------------------------------

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self._clock.at(self._clock.now + seconds, then)

    def _who_waits(self) -> str:
        free = [self._free(worker) for worker in range(len(self._load))]
        return (
            f"at step {self._version} of {self._work.steps} the learner waits for "
            f"{self._work.batch_size} samples with {self._buffer.samples} in the buffer, and the "
            f"workers may start {free} samples with {self._running} running: expected a whole group"
            f" of {self._work.group_size}; check rl.staleness_limit, rl.publish and "
            "rl.buffer.capacity_batches"
        )


def _group(number: int, step: int, size: int) -> Group:
    """A group as the buffer wants it: its samples share one token of the given policy step."""
    turn = Turn(0, 1, StopReason.END_OF_TURN, PolicyVersion(0, step))
    rollout = Rollout(str(number), "", str(number), (0,), (True,), (0.0,), (turn,), 1.0)
    return Group(str(number), "", (ScoredRollout(rollout, 0.0, 0.0),) * size)


def simulate(
    work: Work,
    times: Times,
    workers: int = 1,
    *,
    lockstep: bool = False,
    one_device: bool = False,
    seed: int = 0,
) -> Modelled:
    """Model one run; see `ModelledLoop`."""
    return ModelledLoop(
        work, times, workers, lockstep=lockstep, one_device=one_device, seed=seed
    ).run()
