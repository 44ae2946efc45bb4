"""The generator's side: one rollout worker is kept busy as far as the admission rule lets it.

Each prompt's episodes are a play of their own and hand their places back when they end, so nobody
waits for the slowest episode of a batch. Where generator and learner work in turns, a play is all
that is admitted, one at a time.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tasks.rl.controllers import linear_anneal
from tasks.rl.errors import RewardShapeError, WorkerLostError
from tasks.rl.exchange import LEARNER, Exchange, Seat
from tasks.rl.grader import weigh
from tasks.rl.ledger import SampleFate, SlotState
from tasks.rl.prompt_queue import Ticket
from tasks.rl.rollout_worker import Harvest
from tasks.rl.types import Group

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_OVERDUE = 3
"""Times a prompt is dispatched again before one that is overdue is given up for good."""


class OverdueError(TimeoutError):
    """A worker did not answer within `rl.play_timeout_s`."""


class Producer:
    """Keeps one seat sampling."""

    def __init__(
        self, exchange: Exchange, seat: Seat, start: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        """`start` runs a play beside everything else; its failure ends the run."""
        self._exchange = exchange
        self._config = exchange.config
        self._runtime = exchange.runtime
        self._state = exchange.state
        self._seat = seat
        self._start = start
        self._in_turns = exchange.config.in_turns or exchange.runtime.shares_device

    async def run(self) -> None:
        """Sample, grade and buffer groups until every step is taken."""
        exchange, seat = self._exchange, self._seat
        while not exchange.over:
            if seat.lost.done():
                await self._replace()
            elif exchange.newer_than(seat):
                await self.prove()
            elif admitted := exchange.free(seat):
                await self._dispatch(admitted)
            else:
                await exchange.until(
                    self._may_move, seat.name, "room for samples", [LEARNER], seat.clock
                )

    def _may_move(self) -> bool:
        exchange, seat = self._exchange, self._seat
        return (
            exchange.over
            or seat.lost.done()
            or exchange.newer_than(seat)
            or exchange.free(seat) > 0
        )

    async def _dispatch(self, admitted: int) -> None:
        """Send out what is admitted: at once and beside each other, or a batch in turns."""
        group = self._config.group_size
        if self._in_turns:
            await self._play(self._taken(min(admitted, self._config.batch_size) // group))
            return
        for _ in range(admitted // group):
            self._start(self._play(self._taken(1)))

    def _taken(self, count: int) -> list[Ticket]:
        """The next tickets; their samples are running from now on."""
        self._seat.running += count * self._config.group_size
        return self._state.queue.take(count)

    # -- a play ---------------------------------------------------------------------------------

    async def _play(self, tickets: Sequence[Ticket]) -> None:
        """Sample and grade tickets; whatever happens, their places are handed back."""
        seat, started_s = self._seat, time.monotonic()
        lost, without_fate = seat.lost, 0
        try:
            harvest = await self._sampled(tickets)
            without_fate = len(harvest.rollouts)
            with seat.clock.state(SlotState.GRADE):
                grades = self._runtime.grade(seat.worker, harvest.rollouts)
                groups = await self._within(grades, "grades")
            seat.last_sign_s = time.monotonic()
            await self._proven(max((g.newest_step for g in groups), default=-1), lost)
            without_fate = 0
            self._collect(tickets, harvest, groups)
        except WorkerLostError as error:
            self._state.queue.reissue(t.serial for t in tickets)
            self._exchange.lose(self._seat, lost, error.reason)
        except OverdueError as error:
            self._overdue(tickets, error)
            if seat.last_sign_s < started_s:
                self._exchange.lose(self._seat, lost, str(error))
        finally:
            self._state.ledger.count(SampleFate.DROPPED, without_fate)
            seat.running -= len(tickets) * self._config.group_size
            self._exchange.handed_in += 1
            await self._exchange.ring()

    def _overdue(self, tickets: Sequence[Ticket], error: OverdueError) -> None:
        """Dispatch prompts again, except those that are late each time."""
        self._state.meter.count("overdue_plays")
        again = [t for t in tickets if t.reissue < MAX_OVERDUE]
        hopeless = [t for t in tickets if t.reissue >= MAX_OVERDUE]
        self._state.queue.reissue(t.serial for t in again)
        self._state.queue.consumed(t.serial for t in hopeless)
        self._state.meter.count("abandoned_prompts", len(hopeless))
        logger.warning(
            "%s: %s; dispatched again: rows %s; given up for good: rows %s",
            self._seat.name,
            error,
            [t.row_id for t in again],
            [t.row_id for t in hopeless],
        )

    async def _sampled(self, tickets: Sequence[Ticket]) -> Harvest:
        seat, meter = self._seat, self._state.meter
        temperature = linear_anneal(self._config.sampling.temperature, self._state.learner_version)
        with seat.clock.state(SlotState.ROLLOUT), meter.playing():
            harvest = await self._within(
                self._runtime.play(seat.worker, tickets, self._config.group_size, temperature),
                f"{len(tickets)} prompt(s) being sampled",
            )
        meter.generated(harvest, temperature)
        return harvest

    async def _within(self, call: Awaitable[T], what: str, limit_s: float | None = None) -> T:
        """Await a call to the worker, unless it is lost or the time is up first.

        Raises:
            WorkerLostError, OverdueError: see there.
        """
        if self._runtime.shares_device:  # the call is done when it returns: nothing to guard
            return await call
        seat, limit_s = self._seat, limit_s or self._config.play_timeout_s
        task = asyncio.ensure_future(call)
        try:
            with self._exchange.watchdog.waiting(seat.name, what):
                either: set[asyncio.Future[Any]] = {task, seat.lost}
                await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if seat.lost.done():
                raise WorkerLostError(seat.worker, seat.lost.result())
            raise OverdueError(
                f"{what}: not done after {limit_s:g} s (rl.play_timeout_s="
                f"{self._config.play_timeout_s:g})"
            )
        finally:
            task.cancel()

    # -- what a play gave -----------------------------------------------------------------------

    def _collect(
        self, tickets: Sequence[Ticket], harvest: Harvest, groups: Sequence[Group]
    ) -> None:
        """Buffer what may be trained on; the other prompts are dispatched again, or spent."""
        exchange, queue = self._exchange, self._state.queue
        for refusal in harvest.refused:
            logger.warning("sample %s is left out: %s", refusal.rollout_id, refusal.reason)
        exchange.throw_away(SampleFate.REFUSED, len(harvest.refused))
        refused = Counter(r.group_id for r in harvest.refused)
        graded = {g.group_id: replace(g, excluded=refused[g.group_id]) for g in groups}
        self._check(tickets, graded, refused)
        for ticket in tickets:
            group = graded.get(str(ticket.serial))
            if group is None:
                queue.reissue([ticket.serial])
            elif len(group.rollouts) < min(2, self._config.group_size):
                exchange.drop([group])  # the others were refused: alone it has no baseline
            elif self._without_contrast(group):
                queue.consumed([ticket.serial])
                exchange.throw_away(SampleFate.FILTERED, len(group.rollouts))
            else:
                exchange.drop(exchange.buffer.put(group))

    def _check(
        self, tickets: Sequence[Ticket], graded: dict[str, Group], refused: Counter[str]
    ) -> None:
        for ticket in tickets:
            name = str(ticket.serial)
            rewards = len(graded[name].rollouts) if name in graded else 0
            if rewards + refused[name] != self._config.group_size:
                raise RewardShapeError(
                    f"group {name} (row {ticket.row_id}): the grader answered for {rewards} of "
                    f"{self._config.group_size - refused[name]} samples; expected one reward each, "
                    "None where it cannot tell"
                )

    def _without_contrast(self, group: Group) -> bool:
        """Whether the filter throws a group away: its rewards teach a group estimator nothing."""
        if self._config.filter == "none":
            return False
        weighed = weigh(group.rollouts, self._config.reward, self._state.learner_version)
        return len({r.reward for r in weighed if r.reward is not None}) < 2

    async def _proven(self, step: int, lost: asyncio.Future[str]) -> None:
        """Wait until the worker has proven the weights of a policy step.

        Raises:
            WorkerLostError: it did not live to do so.
        """
        seat = self._seat
        await self._exchange.until(
            lambda: lost.done() or step < 0 or seat.has_proven(step),
            f"{seat.name}'s samples", "proof of their weights", [seat.name],
        )  # fmt: skip
        if lost.done():
            raise WorkerLostError(seat.worker, lost.result())

    # -- weights and losses ---------------------------------------------------------------------

    async def prove(self) -> None:
        """Give the worker the newest weights; what it samples counts once they are proven."""
        exchange, seat = self._exchange, self._seat
        receipt, lost = exchange.receipt, seat.lost
        assert receipt is not None
        try:
            with seat.clock.state(SlotState.SYNC):
                proof = await self._within(
                    self._runtime.sync(seat.worker, receipt),
                    "weights being loaded and proven",
                    2 * self._config.play_timeout_s,  # episodes may have to end first
                )
        except (WorkerLostError, OverdueError) as error:
            reason = error.reason if isinstance(error, WorkerLostError) else str(error)
            exchange.lose(seat, lost, reason)
            return
        self._state.meter.proven(proof)
        seat.proven_step = receipt.version.step
        seat.last_sign_s = time.monotonic()
        await exchange.ring()

    async def catch_up(self) -> None:
        """Prove the newest weights where they are not proven yet, by a replacement if need be."""
        while self._seat.lost.done() or self._exchange.newer_than(self._seat):
            await (self._replace() if self._seat.lost.done() else self.prove())

    async def _replace(self) -> None:
        """Have the runtime start somebody new, who has to prove the newest weights first."""
        seat, waiting = self._seat, self._exchange.watchdog.waiting
        with seat.clock.state(SlotState.STARTUP), waiting(seat.name, "its replacement"):
            try:
                await self._runtime.revive(seat.worker)
                seat.fill()
            except WorkerLostError as error:
                seat.fill()
                self._exchange.lose(seat, seat.lost, error.reason)
        await self._exchange.ring()
