"""A clock that other programs on the machine do not move: seconds of work here, and of sleep.

An event loop of it never waits for its timers. It jumps over the sleep and counts it, so that a
sleep is as long as asked for whoever else is busy, while work nobody logged still takes its time.
"""

import asyncio
import gc
import selectors
import time
from collections.abc import Iterator

import pytest


class MachineTime:
    """Stands in for `time.monotonic`: processor seconds of this process, and what it slept."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        self.threads = 0
        """Calls handed to threads that are not back; their waits cannot be jumped over."""

    def __call__(self) -> float:
        return time.process_time() + self.slept_s

    def sleep(self, seconds: float) -> None:
        """Let everybody in this process stand still."""
        self.slept_s += seconds

    def loop(self) -> asyncio.AbstractEventLoop:
        """A new event loop that lives by this clock, while it stands in for `time.monotonic`."""
        return _Loop(self)


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: MachineTime) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None):
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self._clock.threads:
            return super().select(None)
        self._clock.sleep(timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: MachineTime) -> None:
        super().__init__(_Selector(clock))
        self._clock = clock

    def run_in_executor(self, executor, func, *args):
        self._clock.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(lambda _: self._back())
        return future

    def _back(self) -> None:
        self._clock.threads -= 1


@pytest.fixture
def machine_time(monkeypatch) -> Iterator[MachineTime]:
    """The clock, in the place of `time.monotonic`; nothing is collected meanwhile: how long that
    takes depends on what else this process has loaded."""
    clock = MachineTime()
    monkeypatch.setattr(time, "monotonic", clock)
    gc.disable()
    yield clock
    gc.enable()
