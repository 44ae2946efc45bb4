"""What waited in the buffer at a checkpoint is trained on after a resume, and not sampled again."""

import asyncio

import pytest
from sleepy_runtime import SleepyRuntime

from tasks.artifacts.progress import Reporter
from tasks.artifacts.typed_file import read_typed
from tasks.rl.checkpoint import BUFFER, Checkpoints
from tasks.rl.exchange import slots_of
from tasks.rl.loop import AsyncLoop
from tasks.rl.loop_state import LoopState
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.sample_log import SampleLog
from tasks.rl.types import Group


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def attempt(tiny_config, tmp_path):
    """Run the loop from the last checkpoint, to the end or until `kill_at` steps were taken."""
    config = tiny_config(
        rl={
            "steps": 8,
            "checkpoint_every": 2,
            "staleness_limit": 3,
            "runtime": {"type": "ray", "rollout_workers": 1},
        }
    ).rl

    def run(runtime: SleepyRuntime, kill_at: int | None = None) -> LoopState:
        state = LoopState(config, PromptQueue([f"row{i}" for i in range(99)], 0), slots_of(runtime))
        checkpoints = Checkpoints(tmp_path / "checkpoints", {"config": "c"})
        saved = checkpoints.latest()
        state.attempt = checkpoints.begin_attempt()
        if saved:
            state.resume(saved)
        samples = SampleLog(tmp_path / "samples")
        samples.resume(len(state.trained))
        train = runtime.train

        async def dying(*arguments):
            if runtime.learner_version == kill_at:
                raise Killed
            return await train(*arguments)

        runtime.train = dying
        loop = AsyncLoop(
            config, runtime, state, checkpoints, tmp_path / "publish", Reporter(tmp_path),
            samples=samples,
        )  # fmt: skip
        asyncio.run(asyncio.wait_for(loop.run(saved), 5))
        return state

    return run


def test_buffered_samples_outlive_a_kill(attempt, tmp_path):
    # The learner is slow: the generator fills what the limit allows while it trains.
    first = SleepyRuntime(3, 1, {"play": 0.001, "train": 0.02})
    with pytest.raises(Killed):
        attempt(first, kill_at=4)
    kept = read_typed(tmp_path / "checkpoints" / "step-000004" / BUFFER, tuple[Group, ...])
    names = {r.rollout.rollout_id for g in kept for r in g.rollouts}
    assert len(names) >= 8, "a batch or more was waiting"
    assert not names & set(first.trained)
    second = SleepyRuntime(3, 1, {"play": 0.001, "train": 0.02})
    state = attempt(second)
    trained_again = names & set(second.trained)
    assert trained_again, "freshest first may leave some to age out, never all"
    assert second.sampled < 4 * 8 + 3 * 8, "what was kept is not sampled again"
    logged = [
        r.rollout.rollout_id
        for _, batch in SampleLog(tmp_path / "samples").read()
        for g in batch.groups
        for r in g.rollouts
    ]
    assert len(logged) == len(set(logged)) == 64 and names & set(logged) == trained_again
    serials = [t for batch in state.trained for t in batch.tickets]
    assert len(serials) == len(set(serials)) == 16
    queue = state.queue.state_dict()
    assert not set(serials) & {t["serial"] for t in (*queue["open"], *queue["waiting"])}


def test_a_queue_keeps_open_what_still_has_its_samples():
    queue = PromptQueue(["a", "b", "c", "d", "e"], seed=0)
    taken = queue.take(4)
    queue.consumed([0])
    queue.reissue([1])
    state = queue.state_dict()
    again = PromptQueue(["a", "b", "c", "d", "e"], seed=0)
    again.load_state(state, sampled=[3])
    assert [t.serial for t in again.take(2)] == [2, 1]  # open and lost; then what waited already
    again.consumed([3])
    with pytest.raises(KeyError):
        again.consumed([0])
    assert again.take(1)[0].serial == 4 and taken[3].serial == 3
