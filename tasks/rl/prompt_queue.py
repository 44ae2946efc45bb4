"""Which prompt comes next: shuffled epochs, reissued prompts first, nothing lost or doubled.

Every dispatched prompt is a numbered ticket. A ticket is open until it is consumed; on resume the
tickets a dead attempt had open are dispatched again, in order, but for those whose samples the
checkpoint kept.
"""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.artifacts.content_hash import hash_bytes
from tasks.rl.errors import NoPromptsError


@dataclass(frozen=True)
class Ticket:
    """One dispatch of one prompt; `reissue` counts how often it had to be dispatched again."""

    serial: int
    row_id: str
    reissue: int = 0

    def seed(self, run_seed: int, sample: int) -> int:
        """Seed of one sample of this ticket, 60 bits."""
        text = f"{run_seed}/{self.serial}/{self.reissue}/{sample}"
        return int(hash_bytes(text.encode())[:15], 16)


class PromptQueue:
    """Hands out tickets; its whole state is small JSON."""

    def __init__(self, row_ids: Sequence[str], seed: int) -> None:
        if not row_ids:
            raise NoPromptsError(
                "no training row is left for RL; check data.rl_bands and the quarantine file of "
                "the data stage"
            )
        self._rows = list(row_ids)
        self._seed = seed
        self._next_serial = 0
        self._waiting: list[Ticket] = []
        self._open: dict[int, Ticket] = {}
        self._epoch = -1
        self._order: list[int] = []

    def take(self, count: int) -> list[Ticket]:
        """The next `count` tickets: reissued ones first."""
        taken = []
        for _ in range(count):
            ticket = self._waiting.pop(0) if self._waiting else self._fresh()
            self._open[ticket.serial] = ticket
            taken.append(ticket)
        return taken

    def consumed(self, serials: Iterable[int]) -> None:
        """These tickets were trained on, and are closed."""
        for serial in serials:
            del self._open[serial]

    def reissue(self, serials: Iterable[int]) -> None:
        """These tickets' samples were dropped: dispatch their prompts again, first of all."""
        for serial in serials:
            ticket = self._open.pop(serial)
            self._waiting.append(Ticket(serial, ticket.row_id, ticket.reissue + 1))

    @property
    def dispatched(self) -> int:
        """Distinct tickets handed out so far."""
        return self._next_serial

    def _fresh(self) -> Ticket:
        epoch, position = divmod(self._next_serial, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self._rows)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        ticket = Ticket(self._next_serial, self._rows[self._order[position]])
        self._next_serial += 1
        return ticket

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state. Open tickets are kept as such; `load_state` decides over them."""
        return {
            "next_serial": self._next_serial,
            "waiting": [asdict(t) for t in self._waiting],
            "open": [asdict(t) for _, t in sorted(self._open.items())],
        }

    def load_state(self, state: Mapping[str, Any], sampled: Collection[int] = ()) -> None:
        """Take back a state. Of what was open, tickets in `sampled` still have their samples; the
        others wait again, under the same seeds."""
        self._next_serial = int(state["next_serial"])
        opened = [Ticket(**t) for t in state["open"]]
        self._open = {t.serial: t for t in opened if t.serial in sampled}
        waiting = [Ticket(**t) for t in state["waiting"]]
        self._waiting = [*(t for t in opened if t.serial not in sampled), *waiting]
