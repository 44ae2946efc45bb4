"""The version-stamped ring of finished groups between generator and learner; no clock, no I/O."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from tasks.rl.staleness import too_old
from tasks.rl.types import Group


class BufferOverflowError(RuntimeError):
    """More was admitted than the ring holds: the admission rule was broken."""


@dataclass(frozen=True)
class Taken:
    """What a batch request gave; `groups` is empty while there is not enough."""

    groups: tuple[Group, ...] = ()
    dropped: tuple[Group, ...] = ()
    """Too old to be trained on; their prompts go back to the queue."""


class RolloutBuffer:
    """Keeps groups in arrival order and hands out whole batches, freshest or first in first."""

    def __init__(self, capacity_samples: int, order: Literal["freshest", "fifo"]) -> None:
        self._capacity = capacity_samples
        self._order = order
        self._groups: list[Group] = []

    @property
    def groups(self) -> tuple[Group, ...]:
        """What waits, in arrival order."""
        return tuple(self._groups)

    @property
    def samples(self) -> int:
        """Samples waiting."""
        return sum(g.size for g in self._groups)

    def room(self, step: int, running: int) -> int:
        """Samples of policy step `step` that may start, with `running` on their way: they may push
        older ones out of the ring, but not one another. Without this bound a generator faster than
        the learner would sample for ever what the ring evicts.
        """
        kept = sum(g.size for g in self._groups if g.oldest_step >= step)
        return max(0, self._capacity - kept - running)

    def put(self, group: Group) -> tuple[Group, ...]:
        """Add a group; what no longer fits is evicted, oldest policy version first.

        Raises:
            BufferOverflowError: the group alone is larger than the ring.
        """
        if group.size > self._capacity:
            raise BufferOverflowError(
                f"a group of {group.size} does not fit a buffer of {self._capacity}; "
                "raise rl.buffer.capacity_batches"
            )
        self._groups.append(group)
        evicted = []
        while self.samples > self._capacity:
            oldest = min(range(len(self._groups)), key=lambda i: (self._groups[i].oldest_step, i))
            evicted.append(self._groups.pop(oldest))
        return tuple(evicted)

    def fresh_share(self, count: int, newest_step: int) -> float:
        """Share of the next `count` samples that the newest policy sampled."""
        fresh = sum(g.size for g in self._groups if g.oldest_step >= newest_step)
        return min(1.0, fresh / count)

    def evict(self, learner_version: int, staleness_limit: int) -> tuple[Group, ...]:
        """Remove what the next step must not train on any more."""
        dropped = tuple(
            g for g in self._groups if too_old(g.oldest_step, learner_version, staleness_limit)
        )
        self._forget(dropped)
        return dropped

    def _forget(self, groups: Collection[Group]) -> None:
        ids = {g.group_id for g in groups}
        self._groups = [g for g in self._groups if g.group_id not in ids]

    def take(self, count: int, learner_version: int, staleness_limit: int) -> Taken:
        """A batch of exactly `count` places, none older than the limit; drops what is."""
        dropped = self.evict(learner_version, staleness_limit)
        ready = list(self._groups)
        if self._order == "freshest":
            ready.sort(key=lambda g: -g.oldest_step)
        chosen: list[Group] = []
        missing = count
        for group in ready:
            if group.size <= missing:
                chosen.append(group)
                missing -= group.size
        if missing:
            return Taken(dropped=dropped)
        self._forget(chosen)
        return Taken(tuple(chosen), dropped)
