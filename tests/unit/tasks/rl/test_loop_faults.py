"""What ends a run, and what it outlives: failed proofs, kills, lost and hung workers."""

import asyncio
from collections import Counter

import pytest
from loop_run import accounts_balance
from sleepy_runtime import SleepyRuntime

from tasks.rl.errors import (
    CheckpointMismatchError,
    SyncProofError,
    TooManyWorkersLostError,
    WorkerLostError,
)
from tasks.rl.sentinel import ProbeResult, SentinelTrippedError


def test_a_failed_probe_stops_the_run_and_leaves_the_last_checkpoint(run_of):
    good = 8 * 3 // 4  # tickets of the first three steps
    runtime = SleepyRuntime(0, outcome=lambda serial, i: float(i % 2) if serial < good else 0.0)
    runtime.probes = [ProbeResult("number-0", 1.0, 1.0), ProbeResult("number-1", 0.0, 1.0)]
    run = run_of(runtime, checkpoint_every=1)
    with pytest.raises(SentinelTrippedError, match="number-1"):
        run.go()
    assert runtime.learner_version == 3
    saved = run.checkpoints.latest()
    assert saved.step == 3 and not saved.loop["sentinel"]["failed_probes"]
    repaired = SleepyRuntime(0)
    again = run_of(repaired, resume=True, checkpoint_every=1).go()
    assert repaired.learner_version == 8 and again.state.attempt == 1
    assert {v.attempt for v in repaired.engine} == {1}


def test_an_engine_that_cannot_prove_its_weights_stops_the_run(run_of):
    runtime = SleepyRuntime(1, 2, {"play": 0.001})
    sync = runtime.sync

    async def fails_at_step_3(worker, receipt):
        if receipt.version.step >= 3:
            raise SyncProofError("the engine holds other weights")
        return await sync(worker, receipt)

    runtime.sync = fails_at_step_3
    with pytest.raises(SyncProofError):
        run_of(runtime).go()
    assert all(version.step < 3 for version in runtime.engine)
    assert runtime.learner_version < 8


@pytest.mark.parametrize(("limit", "workers"), [(0, 1), (2, 1), (3, 2)])
def test_killed_and_resumed_no_prompt_is_trained_on_twice_and_none_is_lost(run_of, limit, workers):
    class Killed(BaseException):
        """Stands for SIGKILL."""

    pace = {"play": 0.001, "train": 0.001}
    kept, runtime = [], None
    for kill_at in (3, 6, None):
        runtime = SleepyRuntime(limit, workers, pace)
        train = runtime.train

        async def dying(*arguments, train=train, runtime=runtime, kill_at=kill_at):
            if runtime.learner_version == kill_at:
                raise Killed
            return await train(*arguments)

        runtime.train = dying
        run = run_of(runtime, resume=True, checkpoint_every=2)
        first = run.state.learner_version
        try:
            run.go()
        except Killed:
            assert run.checkpoints.latest().step == kill_at // 2 * 2
        batches = [runtime.trained[i : i + 8] for i in range(0, len(runtime.trained), 8)]
        lasting = (kill_at or 8) // 2 * 2 - first  # later ones died with the weights they made
        kept += [i for batch in batches[:lasting] for i in batch]
    assert runtime.learner_version == 8 and run.state.attempt == 2
    tickets = Counter(i.split(".")[0] for i in kept)
    assert len(kept) == 64 and all(n == 4 for n in tickets.values())
    if limit == 0:
        assert sorted(map(int, tickets)) == list(range(16))
    assert [m["step"] for m in run.metrics][-1] == 8
    assert run.state.ledger.to_json(1.0)["samples"]["trained"] == 64


def test_a_learner_that_comes_back_different_is_refused(run_of):
    runtime = SleepyRuntime(0)
    run_of(runtime, checkpoint_every=4, steps=4).go()
    again = SleepyRuntime(0)

    async def other(folder, steps_taken):
        return {"policy": "else"}

    again.load = other
    with pytest.raises(CheckpointMismatchError, match="differ from the manifest"):
        run_of(again, resume=True, checkpoint_every=4, steps=8).go()


def test_a_dead_worker_is_replaced_and_its_prompts_are_dispatched_again(run_of):
    runtime = SleepyRuntime(2, 2, {"play": 0.002, "train": 0.002, "start": 0.005})
    runtime.dies = lambda play: play in (4, 12)
    run = run_of(runtime).go()
    assert runtime.revived == run.state.meter.counts["worker_losses"] == 2
    assert runtime.learner_version == 8
    accounts_balance(run)
    assert any(int(i.split(".")[1]) > 0 for i in runtime.trained)  # reissued, then trained on
    assert run.metrics[-1]["values"]["worker_losses"] == 2


def test_a_worker_that_dies_over_the_last_publish_is_replaced_too(run_of):
    """Whoever samples the finished policy has to hold it."""

    class DiesAtTheEnd(SleepyRuntime):
        async def sync(self, worker, receipt):
            if receipt.version.step == 8 and not self.revived:
                raise WorkerLostError(worker, "killed")
            return await super().sync(worker, receipt)

    run = run_of(DiesAtTheEnd(1)).go()
    assert run.runtime.revived == run.state.meter.counts["worker_losses"] == 1
    assert run.runtime.proven == [8]


def test_more_losses_than_allowed_end_the_run_by_name(run_of):
    runtime = SleepyRuntime(1, 1, {"play": 0.001})
    runtime.dies = lambda play: play % 3 == 0
    runtime_settings = {"type": "ray", "max_worker_losses": 1}
    with pytest.raises(TooManyWorkersLostError, match=r"max_worker_losses=1: 2 .*killed"):
        run_of(runtime, runtime=runtime_settings).go()
    assert runtime.revived == 1


def test_a_hung_episode_is_given_up_and_the_others_go_on(run_of):
    runtime = SleepyRuntime(2, 1, {"play": 0.002, "train": 0.002})
    runtime.hangs = lambda play: play == 5
    run = run_of(runtime, steps=24, play_timeout_s=0.05).go()
    counts = run.state.meter.counts
    assert (counts["overdue_plays"], counts["worker_losses"]) == (1, 0)  # the worker gave signs
    assert runtime.learner_version == 24
    accounts_balance(run)


def test_a_worker_that_finishes_nothing_is_replaced(run_of):
    runtime = SleepyRuntime(1, 1, {"play": 0.001, "train": 0.001})
    runtime.hangs = lambda play: 5 <= play < 9 and not runtime.revived
    run = run_of(runtime, play_timeout_s=0.05).go()
    assert runtime.revived == run.state.meter.counts["worker_losses"] == 1
    assert runtime.learner_version == 8
    accounts_balance(run)


def test_a_prompt_that_hangs_each_time_is_given_up_for_good(run_of):
    runtime = SleepyRuntime(0, 1, {"train": 0.001})
    runtime.workers = 2
    runtime.engine, runtime.proven, runtime.alive = [None] * 2, [-1] * 2, [True] * 2
    play = runtime.play

    async def hangs_on_ticket_3(worker, tickets, samples, temperature):
        if any(t.serial == 3 for t in tickets):
            await asyncio.sleep(1e6)
        return await play(worker, tickets, samples, temperature)

    runtime.play = hangs_on_ticket_3
    losses = {"type": "ray", "rollout_workers": 2, "max_worker_losses": 9}
    run = run_of(runtime, play_timeout_s=0.03, runtime=losses).go()
    counts = run.state.meter.counts
    assert (counts["overdue_plays"], counts["abandoned_prompts"]) == (4, 1)
    assert runtime.learner_version == 8 and "3" not in {i.split(".")[0] for i in runtime.trained}
