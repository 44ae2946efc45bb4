"""What a modelled loop is given, and what comes out: work, how long things take, the outcome."""

from dataclasses import dataclass, replace
from typing import Literal

from configs.schema.rl import PublishSchedule, RLConfig
from tasks.rl.simulated_engines import DecodeSpeed, LatencyMix, LengthMix

EVERY_STEP = PublishSchedule()
SHORT_ANSWERS = LengthMix(32.0, 0.5, 64)


@dataclass(frozen=True)
class Work:
    """What is to be done: the settings of the loop, and what its samples are like."""

    steps: int
    batch_size: int
    group_size: int
    staleness_limit: int
    publish: PublishSchedule = EVERY_STEP
    checkpoint_every: int = 1
    capacity_batches: int = 5
    order: Literal["freshest", "fifo"] = "freshest"
    fresh_share_floor: float = 0.0
    updates_per_batch: int = 1
    turns_mean: float = 1.0
    """Turns of one sample; 1.4 = one turn in 60 of a hundred samples, two in the others."""
    tokens: LengthMix = SHORT_ANSWERS
    """Of one turn."""
    tool_latency: LatencyMix | None = None
    tool_concurrency: int = 64
    filter_share: float = 0.0
    """Of finished groups, those that are not worth a place in a batch."""

    @classmethod
    def of(cls, rl: RLConfig, steps: int) -> "Work":
        """The settings of a config; what its samples are like is left at the defaults."""
        return cls(
            steps=steps,
            batch_size=rl.batch_size,
            group_size=rl.group_size,
            staleness_limit=rl.staleness_limit,
            publish=rl.publish,
            checkpoint_every=rl.checkpoint_every,
            capacity_batches=rl.buffer.capacity_batches,
            order=rl.buffer.order,
            fresh_share_floor=rl.buffer.fresh_share_floor,
            updates_per_batch=rl.updates_per_batch,
            turns_mean=float(rl.sampling.max_turns),
            tokens=LengthMix(rl.sampling.max_new_tokens / 2, 0.5, rl.sampling.max_new_tokens),
        )


@dataclass(frozen=True)
class Times:
    """How long things take, seconds."""

    decode: DecodeSpeed
    """Of one rollout worker."""
    train_s: float
    """One batch, all its optimiser steps."""
    grade_s: float = 0.0
    """One sample."""
    publish_s: float = 0.0
    prove_s: float = 0.0
    """One worker loading and proving weights."""
    checkpoint_s: float = 0.0


@dataclass(frozen=True)
class Modelled:
    """What the modelled run did."""

    wall_s: float
    step_ends_s: tuple[float, ...]
    """When each batch was trained on, its publish and checkpoint included."""
    ages: tuple[int, ...]
    """Of every trained group, in optimiser steps."""
    dropped: int
    filtered: int
    rollout_s: float
    """Worker-seconds with samples in play."""
    workers_busy_s: float
    """Worker-seconds with samples in play or weights being proven."""
    train_s: float
    sync_s: float
    """Slot-seconds of publishing and proving."""
    both_s: float
    """Seconds in which samples were in play and the learner trained."""
    max_running: int

    def samples_per_s(self, batch_size: int, warm_up: int = 0) -> float:
        """Trained samples a second after the first `warm_up` batches."""
        start_s = self.step_ends_s[warm_up - 1] if warm_up else 0.0
        return batch_size * (len(self.step_ends_s) - warm_up) / (self.step_ends_s[-1] - start_s)


def synchronous(work: Work) -> Work:
    """The same work by the synchronous trainer: η = 0, a publish each step."""
    once = PublishSchedule(start=1, end=1, over_steps=work.publish.over_steps)
    return replace(work, staleness_limit=0, publish=once)
