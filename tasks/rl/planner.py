"""Which split of devices, which η and which publish interval; or that synchronous does as well.

Every candidate is run in the discrete-event model (`simulate`) with the times of a real run, or
assumed ones. Asynchronous training keeps both sides busy but trains on older samples, which teach a
little less; so candidates are compared by effective samples a second, and asynchronous is advised
only where it beats the better synchronous layout by `WORTH_IT`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from configs.schema.rl import PublishSchedule
from tasks.rl.figures import Figures, Layout, run_model
from tasks.rl.simulated_work import Work, synchronous

WORTH_IT = 1.05
"""Asynchronous over synchronous throughput below which the simpler one is advised."""
AS_GOOD = 0.98
"""Share of the best throughput at which the smaller η or N is taken."""
RANK_EFFICIENCY = 0.92
"""What a doubling of the learner's ranks keeps of the doubled speed."""
LIMITS, INTERVALS = (1, 2, 3, 4, 6, 8), (1, 2, 4)
STEPS, WARM_UP = 14, 4
PLAN_SEED = 7
Report = Callable[[str, int, int], None]
"""Told what is being modelled: what, how many of how many."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its loop settings, and what it would do."""

    name: str
    layout: Layout
    staleness_limit: int
    publish: PublishSchedule
    samples_per_s: float
    effective_per_s: float
    mean_age: float
    dropped_share: float
    learner_busy: float
    """Share of the time in which the learner trains."""

    def wall_s(self, samples: float) -> float:
        """Seconds for so many trained samples, the start not counted."""
        return samples / self.samples_per_s

    def usd(self, samples: float, usd_per_device_hour: float) -> float:
        """Price of so many trained samples."""
        return self.wall_s(samples) * self.layout.devices * usd_per_device_hour / 3600

    def usd_per_effective(self, usd_per_device_hour: float) -> float:
        """Price of one effective sample; infinite where nothing teaches."""
        if not self.effective_per_s:
            return math.inf
        return self.layout.devices * usd_per_device_hour / 3600 / self.effective_per_s


@dataclass(frozen=True)
class Plan:
    """What was compared, and the advice."""

    figures: Figures
    devices: int
    synchronous: Candidate
    asynchronous: Candidate | None
    """The best; None where one device cannot be split."""
    splits: tuple[Candidate, ...]
    """Every split at the same η, by number of rollout workers."""

    @property
    def gain(self) -> float:
        """Effective samples a second, asynchronous over synchronous; 1 where there is none."""
        if self.asynchronous is None or not self.synchronous.effective_per_s:
            return 1.0
        return self.asynchronous.effective_per_s / self.synchronous.effective_per_s

    @property
    def stay_synchronous(self) -> bool:
        """Whether the simpler loop does as well."""
        return self.gain < WORTH_IT

    @property
    def best(self) -> Candidate:
        """What is advised."""
        if self.asynchronous is None or self.stay_synchronous:
            return self.synchronous
        return self.asynchronous


def train_s(measured_s: float, measured: Layout, ranks: int) -> float:
    """Seconds of a batch on another number of ranks than were measured."""
    doublings = math.log2(ranks / measured.ranks)
    return measured_s / (2 * RANK_EFFICIENCY) ** doublings


def predict(
    name: str, figures: Figures, work: Work, layout: Layout, clip: tuple[float, float]
) -> Candidate:
    """Model one layout and its settings."""
    times = figures.times_of(work, layout)
    times = replace(times, train_s=train_s(times.train_s, figures.layout, layout.ranks))
    batches = STEPS + work.staleness_limit
    work = replace(work, steps=batches * work.updates_per_batch)
    modelled = run_model(work, times, layout, PLAN_SEED)
    speed = modelled.samples_per_s(work.batch_size, WARM_UP)
    share = sum(figures.teaching.effective_share(age, *clip) for age in modelled.ages)
    trained = batches * work.batch_size
    return Candidate(
        name,
        layout,
        work.staleness_limit,
        work.publish,
        samples_per_s=speed,
        effective_per_s=speed * share / len(modelled.ages),
        mean_age=sum(modelled.ages) / len(modelled.ages),
        dropped_share=modelled.dropped / (trained + modelled.dropped + modelled.filtered),
        learner_busy=modelled.train_s / modelled.wall_s,
    )


def plan(
    figures: Figures,
    clip: tuple[float, float],
    devices: int | None = None,
    report: Report | None = None,
) -> Plan:
    """Compare the synchronous loop with every split of the devices, then with every η and N.

    Args:
        clip: how far below and above 1 the loss lets ratios push.
        devices: as many as the run had, where None.
    """
    devices = devices or figures.layout.devices
    told = report or (lambda what, done, of: None)
    splits = range(1, devices)
    total = 2 + len(splits) + len(LIMITS) + len(INTERVALS)
    sync = _best_synchronous(figures, clip, devices, told, total)
    work = figures.work
    limit = max(LIMITS) // 2
    tried: list[Candidate] = []
    for number, workers in enumerate(splits):
        told(f"{workers} : {devices - workers}", 2 + number, total)
        tried.append(
            _asynchronous(figures, work, Layout(workers, devices - workers), limit, 1, clip)
        )
    best = max(tried, key=lambda c: c.effective_per_s, default=None)
    if best is not None:
        best = _settled(figures, best.layout, clip, told, 2 + len(splits), total)
    return Plan(figures, devices, sync, best, tuple(tried))


def _best_synchronous(
    figures: Figures, clip: tuple[float, float], devices: int, told: Report, total: int
) -> Candidate:
    """All devices at both sides in turns, or the layout as it is with η = 0."""
    work = synchronous(figures.work)
    told("synchronous", 0, total)
    layouts = [Layout(devices, devices, shared=True)]
    if not figures.layout.shared and figures.layout.devices == devices:
        layouts.append(figures.layout)
    found = [predict("synchronous", figures, work, layout, clip) for layout in layouts]
    return max(found, key=lambda c: c.effective_per_s)


def _asynchronous(
    figures: Figures,
    work: Work,
    layout: Layout,
    limit: int,
    interval: int,
    clip: tuple[float, float],
) -> Candidate:
    every = PublishSchedule(start=interval, end=interval, over_steps=1)
    batches = max(work.capacity_batches, limit + 1)
    work = replace(work, staleness_limit=limit, publish=every, capacity_batches=batches)
    return predict("asynchronous", figures, work, layout, clip)


def _settled(
    figures: Figures,
    layout: Layout,
    clip: tuple[float, float],
    told: Report,
    done: int,
    total: int,
) -> Candidate:
    """The smallest η, then the smallest N, that is as good as the best."""
    by_limit = []
    for number, limit in enumerate(LIMITS):
        told(f"η = {limit}", done + number, total)
        by_limit.append(_asynchronous(figures, figures.work, layout, limit, 1, clip))
    chosen = _first_as_good(by_limit)
    by_interval = [chosen]
    for number, interval in enumerate(INTERVALS[1:]):
        told(f"N = {interval}", done + len(LIMITS) + number, total)
        if interval <= chosen.staleness_limit + 1:
            by_interval.append(
                _asynchronous(figures, figures.work, layout, chosen.staleness_limit, interval, clip)
            )
    return _first_as_good(by_interval)


def _first_as_good(candidates: Sequence[Candidate]) -> Candidate:
    best = max(c.effective_per_s for c in candidates)
    return next(c for c in candidates if c.effective_per_s >= AS_GOOD * best)
