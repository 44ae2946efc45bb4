"""Busy and learning less: utilisation that stays while the effective share falls; pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HALF = 6
"""Optimiser steps of each of the two stretches that are compared."""
STEADY = 0.05
"""Utilisation may fall by this and still counts as steady."""
FALL = 0.25
"""Share of its earlier value by which the effective share has to fall."""


@dataclass(frozen=True)
class Divergence:
    """Means over the earlier and the later stretch."""

    utilisation: tuple[float, float]
    effective_share: tuple[float, float]

    def __str__(self) -> str:
        (busy, still_busy), (before, now) = self.utilisation, self.effective_share
        return (
            f"slots are busy {still_busy:.0%} of the time ({busy:.0%} before) and {now:.0%} of the "
            f"samples are effective ({before:.0%} before): the same cost buys less learning. Look "
            "at dropped, filtered and zero-advantage samples, and at the importance weights"
        )


class DivergenceFlag:
    """Compares the last steps with those before; says so once for each stretch."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=2 * HALF)

    def observe(self, utilisation: float, effective_share: float) -> Divergence | None:
        """Note one step; a divergence if the later stretch shows one, which begins a new stretch.

        Args:
            utilisation: share of the slots' time since the last step that was not idle.
            effective_share: effective samples over the samples of the step.
        """
        self._seen.append((utilisation, effective_share))
        if len(self._seen) < 2 * HALF:
            return None
        pairs = list(self._seen)
        before, now = _means(pairs[:HALF]), _means(pairs[HALF:])
        if now[0] < before[0] - STEADY or now[1] > (1 - FALL) * before[1]:
            return None
        self._seen = deque(pairs[HALF:], maxlen=2 * HALF)
        return Divergence((before[0], now[0]), (before[1], now[1]))

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"seen": [list(pair) for pair in self._seen]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        pairs = ((float(busy), float(effective)) for busy, effective in state["seen"])
        self._seen = deque(pairs, maxlen=2 * HALF)


def _means(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    busy, effective = zip(*pairs, strict=True)
    return sum(busy) / len(pairs), sum(effective) / len(pairs)
