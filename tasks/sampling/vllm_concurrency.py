"""How many requests run at once, steered by how full the key-value cache is; no clock, no I/O."""

import asyncio
from collections import deque
from dataclasses import dataclass

from configs.schema.rl_engines import Concurrency

GROWTH = 1.25
GENTLE = 0.9
HARD = 0.5
SETTLE = 4
"""Measurements between two moves: a change shows in the cache only some steps later."""


@dataclass
class ConcurrencyLimit:
    """Grows by a quarter while the cache has room, backs off before vLLM has to throw requests out.

    It moves only where it binds: an idle engine teaches nothing, and requests already running above
    a lowered limit are let end before it is lowered again.
    """

    limit: int
    ceiling: int
    settings: Concurrency
    _seen: int = 0

    def observe(self, kv_use: float, running: int) -> int:
        """Take one measurement: share of the cache in use, requests running. Gives the limit."""
        self._seen += 1
        if self._seen < SETTLE:
            return self.limit
        wanted = self._wanted(kv_use, running)
        if wanted != self.limit:
            self.limit, self._seen = wanted, 0
        return self.limit

    def _wanted(self, kv_use: float, running: int) -> int:
        if kv_use >= self.settings.back_off_at:
            if running > self.limit:
                return self.limit
            factor = HARD if kv_use >= self.settings.halve_at else GENTLE
            return max(1, int(self.limit * factor))
        if kv_use < self.settings.grow_below and running >= self.limit:
            return min(self.ceiling, max(self.limit + 1, int(self.limit * GROWTH)))
        return self.limit


class Gate:
    """Lets at most `limit` in at a time, first come first served; for one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Who stands outside."""
        return sum(not place.done() for place in self._waiting)

    async def enter(self) -> None:
        """Wait for a place and take it; who is cancelled while waiting leaves none behind."""
        if self.running < self.limit and not self.waiting:
            self.running += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Give the place back."""
        self.running -= 1
        self._admit()

    def resize(self, limit: int) -> None:
        """Another limit from now on; nobody inside is sent out."""
        self.limit = limit
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running < self.limit:
            place = self._waiting.popleft()
            if not place.done():
                self.running += 1
                place.set_result(None)
