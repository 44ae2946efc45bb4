"""The two coroutines under any speeds: bounded staleness, no deadlock, nothing lost or doubled."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop_run import accounts_balance
from sleepy_runtime import SleepyRuntime

TWO_STEPS = {"updates_per_batch": 2, "loss": {"type": "decoupled_ppo"}}


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(
    limit=st.integers(0, 4),
    publish=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    updates=st.integers(1, 2),
    workers=st.integers(1, 3),
    play=st.sampled_from([0.0, 0.0005, 0.002]),
    tail=st.sampled_from([1.0, 10.0]),
    train=st.sampled_from([0.0, 0.0005, 0.003]),
    sync=st.sampled_from([0.0, 0.002]),
    buffer=st.fixed_dictionaries(
        {
            "order": st.sampled_from(["freshest", "fifo"]),
            "fresh_share_floor": st.sampled_from([0.0, 0.5, 1.0]),
            "capacity_batches": st.integers(1, 5),
            "when_stale": st.sampled_from(["pause", "lower_lr"]),
        }
    ),
    filtered=st.sampled_from([0, 2, 5]),
    refused=st.booleans(),
    dies=st.booleans(),
    seed=st.integers(0, 99),
)
def test_staleness_stays_bounded_and_nothing_is_lost_at_any_speed(
    run_of,
    tmp_path_factory,
    limit,
    publish,
    updates,
    workers,
    play,
    tail,
    train,
    sync,
    buffer,
    filtered,
    refused,
    dies,
    seed,
):
    pace = {"play": play, "train": train, "sync": sync, "publish": sync, "grade": play / 3}

    def outcome(serial: int, sample: int) -> float:
        alike = filtered and serial % 7 < filtered
        return 1.0 if alike else float(sample % 2)

    runtime = SleepyRuntime(limit, workers, pace, outcome, seed=seed)
    runtime.tail, runtime.updates = tail, updates
    if refused:
        runtime.refuses = lambda serial, sample: serial % 5 == 0 and sample == 2
    if dies:
        runtime.dies = lambda play: play in (3, 9)
    start, end = (min(n, limit + 1) for n in publish)
    run = run_of(
        runtime,
        folder=tmp_path_factory.mktemp("run"),
        steps=8 * updates,
        updates_per_batch=updates,
        loss={"type": "decoupled_ppo" if updates > 1 else "ppo_clip"},
        publish={"start": start, "end": end, "over_steps": 5},
        buffer=buffer,
        filter="zero_variance" if filtered else "none",
    ).go()
    assert runtime.learner_version == run.state.learner_version == 8 * updates
    assert max(runtime.ages) == run.state.meter.max_staleness_seen <= limit
    accounts_balance(run, refused=refused)
    assert [m["step"] for m in run.metrics] == list(range(updates, 8 * updates + 1, updates))
    assert runtime.revived == run.state.meter.counts["worker_losses"] <= 2 * dies
    assert all(0 < scale <= 1 for scale in runtime.lr_scales) or limit > 0


@pytest.mark.parametrize("workers", [1, 3])
def test_at_limit_0_nothing_is_sampled_in_vain(run_of, workers):
    runtime = SleepyRuntime(0, workers, {"play": 0.002, "train": 0.004})
    run = run_of(runtime).go()
    assert runtime.ages == [0] * len(runtime.ages)
    assert runtime.sampled == 8 * 8 == len(runtime.trained)  # the batch in training counts
    assert run.state.queue.dispatched == 16
    assert not runtime.overlapped


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_with_a_limit_both_sides_work_at_once_and_samples_age(run_of, limit):
    runtime = SleepyRuntime(limit, 1, {"play": 0.004, "train": 0.004})
    run = run_of(runtime, steps=12).go()
    assert runtime.overlapped and 1 <= max(runtime.ages) <= limit
    overlap = run.state.meter.overlap
    assert 0.2 < overlap.both_s / overlap.any_s <= 1
    assert any(m["values"]["staleness_mean"] > 0 for m in run.metrics)


def test_no_worker_runs_ahead_of_what_may_be_trained_on(run_of):
    """A learner that never finishes a step leaves exactly (η + 1) batches made or in training."""
    runtime = SleepyRuntime(2, 2, {"train": 1e6})
    run = run_of(runtime)

    async def some_time() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.loop.run(None), 0.3)

    asyncio.run(some_time())
    assert runtime.sampled == 3 * 8


def test_publishing_less_often_keeps_within_the_limit(run_of):
    runtime = SleepyRuntime(3, 1, {"play": 0.001, "train": 0.001})
    run = run_of(runtime, steps=16, publish={"start": 4, "end": 4}).go()
    assert run.state.meter.counts["proofs"] == 1 + 16 // 4
    assert max(runtime.ages) == 3


@pytest.mark.parametrize("limit", [0, 3])
def test_a_skipped_step_takes_no_version_and_the_run_still_ends(run_of, limit):
    runtime = SleepyRuntime(limit, 2, {"play": 0.001, "train": 0.001})
    runtime.skip_steps = {1, 4, 5}
    run = run_of(runtime, checkpoint_every=1).go()
    assert runtime.learner_version == 8 and runtime.attempts_at_training == 11
    assert run.state.meter.counts["skipped_steps"] == 3
    assert run.checkpoints.latest().step == 8
    accounts_balance(run)


def test_episodes_carried_over_a_publish_age_by_their_first_token(run_of):
    runtime = SleepyRuntime(3, 1, {"play": 0.004, "train": 0.002}, seed=1)
    run = run_of(runtime, steps=16).go()
    carried = run.state.meter.counts["carried_episodes"]
    assert 0 < carried <= run.state.meter.counts["episodes"]
    assert any(m["values"].get("carried_share", 0) > 0 for m in run.metrics)
    assert max(runtime.ages) <= 3


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_too_little_fresh_lowers_the_learning_rate_where_asked(run_of, order):
    runtime = SleepyRuntime(3, 1, {"play": 0.001, "train": 0.004})
    buffer = {"order": order, "fresh_share_floor": 1.0, "when_stale": "lower_lr"}
    run_of(runtime, steps=16, buffer=buffer).go()
    assert set(runtime.lr_scales) <= {
        0.0,
        0.5,
        1.0,
    }  # of the two groups of a batch, none, one, both
    assert min(runtime.lr_scales) < 1


def test_a_batch_trained_on_for_several_steps_keeps_within_the_limit(run_of):
    """Checkpoints every 5 steps come at the ends of batches that passed one: 6, 10 and 16."""
    runtime, saved = SleepyRuntime(2, 1, {"play": 0.001, "train": 0.001}), []
    runtime.updates, save = 2, runtime.save

    async def noted(folder):
        saved.append(runtime.learner_version)
        return await save(folder)

    runtime.save = noted
    run = run_of(runtime, steps=16, checkpoint_every=5, **TWO_STEPS).go()
    assert run.state.learner_version == 16 and runtime.attempts_at_training == 8
    assert max(runtime.ages) == 2 and set(runtime.ages) == {0, 2}
    assert saved == [6, 10, 16] and run.checkpoints.latest().step == 16


def test_a_publish_due_amid_a_batch_comes_at_its_end(run_of):
    """Every 3 steps, two a batch: due at 3 and published at 4, due at 7 and published at 8 …"""
    runtime = SleepyRuntime(2, 1, {"play": 0.001, "train": 0.001})
    runtime.updates, sync, loaded = 2, runtime.sync, []

    async def noted(worker, receipt):
        loaded.append(receipt.version.step)
        return await sync(worker, receipt)

    runtime.sync = noted
    run_of(runtime, steps=14, publish={"start": 3, "end": 3}, **TWO_STEPS).go()
    assert loaded == [0, 4, 8, 12, 14]  # the finished weights are published whatever is due
    assert max(runtime.ages) <= 2


def test_a_batch_one_step_short_shifts_the_others_and_the_run_still_ends(run_of):
    """Steps 2, 4, 5, 7, 8, 10, 12: the batches go on from wherever the last one ended."""
    runtime = SleepyRuntime(1, 1, {"play": 0.001, "train": 0.001})
    runtime.updates, runtime.short_steps = 2, {3, 5}
    run = run_of(runtime, steps=12, publish={"start": 2, "end": 2}, **TWO_STEPS).go()
    assert [m["step"] for m in run.metrics] == [2, 4, 5, 7, 8, 10, 12]
    assert run.state.learner_version == 12 and max(runtime.ages) <= 1
    accounts_balance(run)
