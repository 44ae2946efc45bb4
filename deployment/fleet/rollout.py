"""Which device comes next: one canary, then waves, an end at the first failure. No I/O, no clock.

`run` drives it; the rule itself is in `Rollout` and can be read and tested without a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["deployed", "unchanged", "failed", "not_tried"]


@dataclass
class Rollout:
    """The state of one rollout over devices by name, in order."""

    names: Sequence[str]
    wave_size: int
    keep_going: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _handed_out: int = 0

    def __post_init__(self) -> None:
        if self.wave_size < 1:
            raise ValueError(f"wave_size={self.wave_size}: expected at least 1")
        if len(set(self.names)) != len(self.names):
            raise ValueError("a device stands twice in the rollout")

    @property
    def stopped(self) -> bool:
        """Whether a failure ended it before all devices were tried."""
        return not self.keep_going and "failed" in self.outcomes.values()

    def next_wave(self) -> tuple[str, ...]:
        """The devices to do now, all at once; empty at the end. The first wave is the canary.

        Raises:
            ValueError: the wave before has not been recorded in full.
        """
        pending = [n for n in self.names[: self._handed_out] if n not in self.outcomes]
        if pending:
            raise ValueError(f"the outcome of {', '.join(pending)} is not known yet")
        if self.stopped:
            return ()
        size = 1 if self._handed_out == 0 else self.wave_size
        wave = tuple(self.names[self._handed_out : self._handed_out + size])
        self._handed_out += len(wave)
        return wave

    def record(self, name: str, outcome: Outcome) -> None:
        """Keep what became of a device that was handed out.

        Raises:
            ValueError: it was not handed out, or is known already.
        """
        if name not in self.names[: self._handed_out] or name in self.outcomes:
            raise ValueError(f"{name} is not being deployed to")
        self.outcomes[name] = outcome

    def finished(self) -> dict[str, Outcome]:
        """Every device's outcome; those a stop left out are `not_tried`."""
        return {name: self.outcomes.get(name, "not_tried") for name in self.names}


def waves(names: Sequence[str], wave_size: int) -> list[tuple[str, ...]]:
    """The waves of a rollout in which nothing fails; what `--dry-run` shows."""
    rollout, found = Rollout(names, wave_size), []
    while wave := rollout.next_wave():
        found.append(wave)
        for name in wave:
            rollout.record(name, "deployed")
    return found
