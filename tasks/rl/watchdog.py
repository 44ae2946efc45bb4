"""Who waits for whom, since when: a run that hangs says so, and names the chain.

A pure state machine with the clock passed in. Whoever awaits something says so for as long as it
does; `look` follows the waits from the one that has lasted longest to the one nobody explains.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tasks.rl.errors import StalledError

logger = logging.getLogger(__name__)
LOOKS_PER_LIMIT = 4
"""How often the patrol looks within the shorter of the two limits."""


@dataclass(frozen=True)
class Wait:
    """`who` has been waiting for `for_what`, which one of `of` has to bring."""

    who: str
    for_what: str
    of: tuple[str, ...]
    """Who could end it; empty where it is the waiter's own work."""
    age_s: float

    def __str__(self) -> str:
        return f"{self.who} waits for {self.for_what} ({self.age_s:.0f} s)"


@dataclass(frozen=True)
class Stall:
    """The longest wait and what explains it."""

    chain: tuple[Wait, ...]
    closes_at: str | None = None
    """Who of the chain the last one waits for: a circle, in which nothing will ever move."""

    def __str__(self) -> str:
        text = " <- ".join(map(str, self.chain))
        return f"{text} <- {self.closes_at}: a circle" if self.closes_at else text


class Watchdog:
    """Knows every wait that is going on."""

    def __init__(self, after_s: float, abort_s: float, clock: Callable[[], float]) -> None:
        """Waits older than `after_s` are told once each, older than `abort_s` end the run."""
        self._after_s = after_s
        self._abort_s = abort_s
        self._clock = clock
        self._keys = itertools.count()
        self._waits: dict[int, tuple[str, str, tuple[str, ...], float]] = {}
        self._told: set[int] = set()

    @contextmanager
    def waiting(self, who: str, for_what: str, of: Sequence[str] = ()) -> Iterator[None]:
        """Say that `who` waits for `for_what`, until the block is left; waits may overlap."""
        key = next(self._keys)
        self._waits[key] = (who, for_what, tuple(of), self._clock())
        try:
            yield
        finally:
            del self._waits[key]
            self._told.discard(key)

    @property
    def waits(self) -> list[Wait]:
        """Every wait now, the longest first."""
        return [wait for _, wait in self._aged()]

    def look(self) -> Stall | None:
        """The longest wait of at least `after_s` that was not told before, with its chain."""
        for key, wait in self._aged():
            if wait.age_s < self._after_s:
                return None
            if key not in self._told:
                self._told.add(key)
                return self._explained(wait)
        return None

    def check(self) -> None:
        """Log each stall once.

        Raises:
            StalledError: something has been waited for longer than `abort_s`.
        """
        while (stall := self.look()) is not None:
            logger.warning("stalled: %s", stall)
        aged = self._aged()
        if aged and aged[0][1].age_s >= self._abort_s:
            raise StalledError(
                f"rl.stall_abort_s={self._abort_s:g}: {self._explained(aged[0][1])}. The last "
                "checkpoint is whole: run again to go on from it, or raise the limit if the last "
                "of them is only slow"
            )

    async def patrol(self) -> None:
        """Check for ever; see `check` for what it raises."""
        while True:
            self.check()
            await asyncio.sleep(min(self._after_s, self._abort_s) / LOOKS_PER_LIMIT)

    def _aged(self) -> list[tuple[int, Wait]]:
        """Waits by key, longest first; equally long ones as they began."""
        now_s = self._clock()
        aged = [
            (key, Wait(who, for_what, of, now_s - since_s))
            for key, (who, for_what, of, since_s) in self._waits.items()
        ]
        return sorted(aged, key=lambda item: (-item[1].age_s, item[0]))

    def _explained(self, wait: Wait) -> Stall:
        """Follow the longest wait of whoever could end the one before, out of circles if it can."""
        return _follow((wait,), self.waits)


def _follow(chain: tuple[Wait, ...], waits: Sequence[Wait]) -> Stall:
    candidates = [w for w in waits if w.who in chain[-1].of]
    if not candidates:
        return Stall(chain)
    closed = [w.who for w in candidates if w.who in [c.who for c in chain]]
    found = [_follow((*chain, w), waits) for w in candidates if w.who not in closed]
    ends = [stall for stall in found if stall.closes_at is None]
    return (ends or found or [Stall(chain, closes_at=closed[0])])[0]
