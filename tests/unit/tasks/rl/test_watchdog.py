"""The watchdog, by hand with a clock that only tests move, and hangs of the real loop."""

import asyncio
import logging
import pickle
import time

import pytest
from sleepy_runtime import SleepyRuntime

from tasks.artifacts.progress import Reporter
from tasks.rl.checkpoint import Checkpoints
from tasks.rl.errors import StalledError
from tasks.rl.exchange import slots_of
from tasks.rl.loop import AsyncLoop
from tasks.rl.loop_state import LoopState
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.watchdog import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dog(clock):
    return Watchdog(after_s=10, abort_s=60, clock=clock)


def test_nobody_waits(dog, clock):
    clock.now_s += 1000
    assert dog.waits == [] and dog.look() is None
    dog.check()


def test_a_wait_counts_from_its_begin_and_is_over_with_its_block(dog, clock):
    with dog.waiting("consumer", "samples"):
        clock.now_s += 9.9
        assert dog.look() is None
        clock.now_s += 0.1
        assert [(w.who, w.for_what) for w in dog.look().chain] == [("consumer", "samples")]
    assert dog.waits == []
    with pytest.raises(ValueError), dog.waiting("learner", "step"):
        raise ValueError
    assert dog.waits == []


def test_the_chain_goes_to_the_one_nobody_explains(dog, clock):
    with dog.waiting("rollout-1", "tool calc"):
        clock.now_s += 5
        with dog.waiting("consumer", "samples", of=["rollout-0", "rollout-1"]):
            clock.now_s += 7
            assert str(dog.look()) == "rollout-1 waits for tool calc (12 s)"
            clock.now_s += 5
            assert str(dog.look()) == (
                "consumer waits for samples (12 s) <- rollout-1 waits for tool calc (17 s)"
            )


def test_of_those_who_could_help_the_one_that_waits_longest_is_named(dog, clock):
    with dog.waiting("consumer", "samples", of=["rollout-0", "rollout-1"]):
        clock.now_s += 4
        with dog.waiting("rollout-1", "play"):
            clock.now_s += 3
            with dog.waiting("rollout-0", "play"):
                clock.now_s += 3
                assert str(dog.look()).endswith(" <- rollout-1 waits for play (6 s)")


def test_a_circle_is_called_one(dog, clock):
    with (
        dog.waiting("consumer", "samples", of=["rollout-0"]),
        dog.waiting("rollout-0", "capacity", of=["consumer"]),
    ):
        clock.now_s += 10
        stall = dog.look()
        assert stall.closes_at == "consumer"
        assert str(stall) == (
            "consumer waits for samples (10 s) <- rollout-0 waits for capacity (10 s)"
            " <- consumer: a circle"
        )


def test_a_circle_behind_the_first_waiter_ends_too(dog, clock):
    with (
        dog.waiting("checkpoint", "step", of=["consumer"]),
        dog.waiting("consumer", "samples", of=["rollout-0"]),
        dog.waiting("rollout-0", "capacity", of=["consumer"]),
    ):
        clock.now_s += 10
        stall = dog.look()
        assert [w.who for w in stall.chain] == ["checkpoint", "consumer", "rollout-0"]
        assert stall.closes_at == "consumer"


def test_one_worker_that_still_works_opens_the_circle(dog, clock):
    with (
        dog.waiting("consumer", "samples", of=["rollout-0", "rollout-1"]),
        dog.waiting("rollout-0", "capacity", of=["consumer"]),
    ):
        clock.now_s += 10
        with dog.waiting("rollout-1", "play"):
            stall = dog.look()
    assert stall.closes_at is None
    assert [w.who for w in stall.chain] == ["consumer", "rollout-1"]


def test_each_wait_is_told_once_and_aborts_at_its_limit(dog, clock, caplog):
    caplog.set_level(logging.WARNING)
    with dog.waiting("rollout-0", "play"):
        clock.now_s += 10
        dog.check()
        dog.check()
        with dog.waiting("consumer", "samples", of=["rollout-0"]):
            clock.now_s += 49.9
            dog.check()
            assert [r.getMessage() for r in caplog.records] == [
                "stalled: rollout-0 waits for play (10 s)",
                "stalled: consumer waits for samples (50 s) <- rollout-0 waits for play (60 s)",
            ]
            clock.now_s += 0.1
            with pytest.raises(StalledError, match=r"stall_abort_s=60: rollout-0 waits for play"):
                dog.check()


def test_the_error_crosses_a_process():
    error = pickle.loads(pickle.dumps(StalledError("consumer waits")))
    assert isinstance(error, TimeoutError) and str(error) == "consumer waits"


class HungLearner(SleepyRuntime):
    """Never ends its second step."""

    async def train(self, *arguments):
        if self.learner_version:
            await asyncio.Event().wait()
        return await super().train(*arguments)


def hang(runtime, config, folder) -> str:
    """Run the engine's loop over a runtime that hangs; what the watchdog said when it ended it."""
    queue = PromptQueue(["a", "b", "c"], seed=0)
    state = LoopState(config.rl, queue, slots_of(runtime))
    checkpoints = Checkpoints(folder / "checkpoints", {})
    state.attempt = checkpoints.begin_attempt()
    loop = AsyncLoop(config.rl, runtime, state, checkpoints, folder / "publish", Reporter(folder))
    started_s = time.monotonic()
    with pytest.raises(StalledError) as caught:
        asyncio.run(asyncio.wait_for(loop.run(None), 20))
    assert time.monotonic() - started_s >= 0.4
    return str(caught.value)


@pytest.fixture
def impatient(tiny_config):
    """A config whose loop gives up after 0.4 s."""
    stall = {"stall_after_s": 0.1, "stall_abort_s": 0.4}
    return tiny_config(rl={"staleness_limit": 1, "runtime": {"type": "ray"}} | stall)


def test_a_learner_that_hangs_ends_the_run(impatient, tmp_path):
    said = hang(HungLearner(1), impatient, tmp_path)
    assert "learner waits for a step (0 s). The last checkpoint is whole" in said


def test_a_worker_that_hangs_ends_the_run(impatient, tmp_path):
    runtime = SleepyRuntime(1)
    runtime.hangs = lambda play: play > 2
    said = hang(runtime, impatient, tmp_path)
    assert "rollout-0 waits for 1 prompt(s) being sampled" in said
