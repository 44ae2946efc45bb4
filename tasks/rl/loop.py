"""The loop: generator and learner side by side; rules, not turns, keep them together.

Admission bounds how far generation runs ahead, consumption drops what became too old, and nothing
is trained on that was sampled from weights an engine has not proven to hold. The two sides are in
`producer` and `consumer`, what they share in `exchange`.
"""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from configs.schema.rl import RLConfig
from tasks.artifacts.progress import Reporter
from tasks.artifacts.typed_file import read_typed
from tasks.rl.checkpoint import BUFFER, Checkpoints, Saved
from tasks.rl.consumer import Consumer
from tasks.rl.errors import CheckpointMismatchError
from tasks.rl.exchange import Exchange
from tasks.rl.ledger import SlotState
from tasks.rl.loop_state import LoopState
from tasks.rl.producer import Producer
from tasks.rl.reward_gate import RewardGate
from tasks.rl.runtime.types import Runtime
from tasks.rl.sample_log import SampleLog
from tasks.rl.types import Group
from tasks.rl.watchdog import Watchdog


class Crew:
    """Coroutines side by side; the first that fails ends the run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the others."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._failed.done():
            return
        error = task.exception()
        if error is not None:
            self._failed.set_exception(error)

    async def until_done(self, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` to its end, or to the first failure of anybody; then stop the others."""
        task = asyncio.create_task(main)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            (self._failed if self._failed.done() else task).result()
        finally:
            self._failed.cancel()
            left = [task, *self._tasks]
            for other in left:
                other.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class AsyncLoop:
    """One attempt at `rl.steps` optimiser steps."""

    def __init__(
        self,
        config: RLConfig,
        runtime: Runtime,
        state: LoopState,
        checkpoints: Checkpoints,
        publish_root: Path,
        report: Reporter,
        gate: RewardGate | None = None,
        samples: SampleLog | None = None,
    ) -> None:
        """Without a `gate` no batch is held against the reward suite; without `samples` none is
        kept."""
        self._runtime = runtime
        self._gate = gate
        self.watchdog = Watchdog(config.stall_after_s, config.stall_abort_s, time.monotonic)
        self.exchange = Exchange(config, runtime, state, self.watchdog)
        self.consumer = Consumer(self.exchange, checkpoints, publish_root, report, gate, samples)

    async def run(self, saved: Saved | None) -> None:
        """Start both sides, go on from `saved` if there is one, and take every step."""
        exchange, crew = self.exchange, Crew()
        exchange.started_s = time.monotonic()
        producers = [Producer(exchange, seat, crew.start) for seat in exchange.seats]
        try:
            with exchange.everyone(SlotState.STARTUP):
                await self._runtime.start()
                if saved is not None:
                    await self._load(saved)
                for seat in exchange.seats:
                    seat.fill()
                await self.consumer.publish()
                for producer in producers:
                    await producer.prove()
            crew.start(self.watchdog.patrol())
            for producer in producers:
                crew.start(producer.run())
            await crew.until_done(self.consumer.run())
            with exchange.everyone(SlotState.SYNC):  # whoever samples next samples the finished
                for producer in producers:
                    await producer.catch_up()
        finally:
            if self._gate is not None:
                self._gate.close()

    def wall_s(self) -> float:
        """Wall-clock of this attempt so far."""
        return self.exchange.wall_s()

    async def _load(self, saved: Saved) -> None:
        found = await self._runtime.load(saved.folder, saved.step)
        if dict(found) != dict(saved.learner):
            raise CheckpointMismatchError(
                f"{saved.folder}: the learner's tensors differ from the manifest after loading; "
                "move the folder away to start RL anew"
            )
        for group in read_typed(saved.folder / BUFFER, tuple[Group, ...]):
            self.exchange.buffer.put(group)
