"""The cost ledger: where every second of every placement slot went, and what it bought.

A slot is a GPU, or here a CPU core's worth of process, that is paid for as long as the run lasts.
Every state is measured and none is what is left over, so the books can fail to balance: time nobody
logged shows as a miss, not as idleness.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

TOLERANCE = 0.01
"""Share of wall-clock × slots by which the books may miss."""


class SlotState(str, Enum):
    """What a slot does; other names may be added by whoever measures them."""

    STARTUP = "startup"
    ROLLOUT = "rollout"
    GRADE = "grade"
    TRAIN = "train"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"
    IDLE = "idle"


_BESIDES: Mapping[str, int] = {SlotState.IDLE: 0, SlotState.ROLLOUT: 1}
"""States that yield the time to others open beside them, however late they were opened."""


class SampleFate(str, Enum):
    """How a generated sample ended."""

    TRAINED = "trained"
    DROPPED = "dropped"
    """Too old, evicted, or of a dropped batch."""
    FILTERED = "filtered"
    """Of a group without contrast, or unscored."""
    REFUSED = "refused"
    """The engine's answer could not be trained on; its group went on without it."""


class LedgerError(ValueError):
    """An entry no honest clock can make: unknown slot, negative or non-finite time or count."""


class ClockOrderError(RuntimeError):
    """Time ran backwards."""


@dataclass(frozen=True)
class LedgerBalance:
    """Measured against expected slot-seconds; no slot's excess pays for another's miss."""

    wall_s: float
    slots: int
    measured_s: float
    missing_s_by_slot: Mapping[str, float]
    """wall − measured, per slot; negative where time was counted twice."""

    @property
    def expected_s(self) -> float:
        """wall-clock × slots."""
        return self.wall_s * self.slots

    @property
    def miss_share(self) -> float:
        """Σ |wall − measured| over slots, as a share of what was expected; 0 for an empty run."""
        missed = sum(abs(m) for m in self.missing_s_by_slot.values())
        return missed / self.expected_s if self.expected_s else float(missed > 0)

    @property
    def balanced(self) -> bool:
        """True = the books meet wall-clock × slots within 1 %."""
        return self.miss_share <= TOLERANCE

    def __str__(self) -> str:
        worst = max(self.missing_s_by_slot.items(), key=lambda item: abs(item[1]))
        return (
            f"{self.measured_s:.2f} s measured of {self.expected_s:.2f} s ({self.wall_s:.2f} s × "
            f"{self.slots} slots): off by {self.miss_share:.2%}, most in {worst[0]} "
            f"({worst[1]:+.2f} s missing)"
        )


@dataclass(frozen=True)
class CostSummary:
    """What the run cost so far; `usd_per_effective_sample` is None before the first one."""

    device_s: float
    usd: float
    seconds_by_use: Mapping[str, float]
    """Sums to `device_s`: the states, with the share of rollout and grading that went into samples
    never trained on moved to `dropped` and `filtered`."""
    dropped_share: float
    filtered_share: float
    effective_samples: float
    usd_per_effective_sample: float | None


class CostLedger:
    """Accumulates seconds per slot and state, and samples by fate; a sum, so order is free."""

    def __init__(
        self, slots: Sequence[str], usd_per_device_hour: float, earlier_wall_s: float = 0.0
    ) -> None:
        """`earlier_wall_s`: wall-clock of the attempts whose seconds are already in the books."""
        if not slots or len(set(slots)) != len(slots):
            raise LedgerError(f"slots={list(slots)}: expected one or more distinct names")
        self._seconds: dict[str, dict[str, float]] = {slot: {} for slot in slots}
        self._samples = dict.fromkeys(SampleFate, 0)
        self._effective_samples = 0.0
        self._usd_per_device_hour = usd_per_device_hour
        self._earlier_wall_s = earlier_wall_s

    def add(self, slot: str, state: str, seconds: float) -> None:
        """Book `seconds` that `slot` spent in `state`."""
        if slot not in self._seconds:
            raise LedgerError(f"slot {slot!r}: expected one of {sorted(self._seconds)}")
        _require_amount("seconds", seconds)
        name = state.value if isinstance(state, SlotState) else state
        states = self._seconds[slot]
        states[name] = states.get(name, 0.0) + seconds

    def count(self, fate: SampleFate, samples: int) -> None:
        """Book the end of `samples` generated samples."""
        _require_amount("samples", samples)
        self._samples[fate] += samples

    def add_effective(self, samples: float) -> None:
        """Book the effective samples of one optimiser step."""
        _require_amount("effective samples", samples)
        self._effective_samples += samples

    def seconds_by_state(self) -> dict[str, float]:
        """Slot-seconds of each state, over all slots."""
        totals: dict[str, float] = {}
        for states in self._seconds.values():
            for state, seconds in states.items():
                totals[state] = totals.get(state, 0.0) + seconds
        return totals

    def balance(self, wall_s: float) -> LedgerBalance:
        """Hold the books against this attempt's wall-clock (earlier attempts are added)."""
        _require_amount("wall_s", wall_s)
        total_wall_s = self._earlier_wall_s + wall_s
        measured = {slot: sum(states.values()) for slot, states in self._seconds.items()}
        return LedgerBalance(
            wall_s=total_wall_s,
            slots=len(measured),
            measured_s=sum(measured.values()),
            missing_s_by_slot={slot: total_wall_s - s for slot, s in measured.items()},
        )

    def share(self, fate: SampleFate) -> float:
        """Share of finished samples that ended this way; 0 before any has."""
        finished = sum(self._samples.values())
        return self._samples[fate] / finished if finished else 0.0

    def cost(self) -> CostSummary:
        """Seconds and money so far, split by what they went into."""
        by_use = self.seconds_by_state()
        device_s = sum(by_use.values())
        dropped, filtered = self.share(SampleFate.DROPPED), self.share(SampleFate.FILTERED)
        made = sum(by_use.get(state.value, 0.0) for state in (SlotState.ROLLOUT, SlotState.GRADE))
        for state in (SlotState.ROLLOUT, SlotState.GRADE):
            if state.value in by_use:
                by_use[state.value] *= 1 - dropped - filtered
        by_use |= {"dropped": made * dropped, "filtered": made * filtered}
        usd = device_s / 3600 * self._usd_per_device_hour
        effective = self._effective_samples
        return CostSummary(
            device_s=device_s,
            usd=usd,
            seconds_by_use=by_use,
            dropped_share=dropped,
            filtered_share=filtered,
            effective_samples=effective,
            usd_per_effective_sample=usd / effective if effective else None,
        )

    def to_json(self, wall_s: float) -> dict[str, Any]:
        """The books at `wall_s` into this attempt, for a checkpoint; flush the clocks first."""
        _require_amount("wall_s", wall_s)
        return {
            "earlier_wall_s": self._earlier_wall_s + wall_s,
            "effective_samples": self._effective_samples,
            "samples": {fate.value: n for fate, n in self._samples.items()},
            "seconds": {slot: dict(states) for slot, states in self._seconds.items()},
            "usd_per_device_hour": self._usd_per_device_hour,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "CostLedger":
        """The books a checkpoint holds, open for a new attempt."""
        ledger = cls(list(state["seconds"]), state["usd_per_device_hour"], state["earlier_wall_s"])
        for slot, states in state["seconds"].items():
            for name, seconds in states.items():
                ledger.add(slot, name, seconds)
        for fate, samples in state["samples"].items():
            ledger.count(SampleFate(fate), samples)
        ledger.add_effective(state["effective_samples"])
        return ledger


class SlotClock:
    """Books one slot's time, each moment in at most one state; one thread a clock.

    ```
    clock = SlotClock(ledger, "learner", time.monotonic)
    with clock.state("train"):
        ...
        with clock.state("sync"):  # not train meanwhile
            ...
    ```
    Coroutines may open states beside each other and close them in any order. The state opened last
    has the time; only, a slot that samples is not idle, and one that does anything besides sampling
    books that. Time outside every `with` is booked nowhere, and the balance will say so.
    """

    def __init__(self, ledger: CostLedger, slot: str, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._slot = slot
        self._now = now
        self._open: list[str] = []
        self._since = now()

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        """Book the time of the block under `name`, unless another open state has it."""
        self.flush()
        self._open.append(name)
        try:
            yield
        finally:
            self.flush()
            latest = len(self._open) - 1 - self._open[::-1].index(name)
            del self._open[latest]

    def _booked(self) -> str:
        """The open state that has the time now."""
        return max(enumerate(self._open), key=lambda item: (_BESIDES.get(item[1], 2), item[0]))[1]

    def flush(self) -> None:
        """Book the open state up to now, e.g. before a checkpoint."""
        now = self._now()
        if now < self._since:
            raise ClockOrderError(
                f"slot {self._slot!r}: time went from {self._since} back to {now}; use a monotonic "
                "clock"
            )
        if self._open:
            self._ledger.add(self._slot, self._booked(), now - self._since)
        self._since = now


def _require_amount(name: str, amount: float) -> None:
    if not 0 <= amount < float("inf"):
        raise LedgerError(f"{name}={amount}: expected a finite number, 0 or more")
