"""Samples that are not worth a place: thrown away, refused, sampled anew, within bounds."""

import pytest
from loop_run import accounts_balance
from sleepy_runtime import SleepyRuntime

from tasks.rl.consumer import MAX_EMPTY_BATCHES
from tasks.rl.errors import (
    NothingToLearnError,
    RefillLimitError,
    RewardShapeError,
)


def test_an_all_zero_batch_is_never_trained_on_and_the_end_is_named(run_of):
    runtime = SleepyRuntime(1, outcome=lambda serial, sample: 0.0)
    run = run_of(runtime)
    with pytest.raises(NothingToLearnError, match=rf"{MAX_EMPTY_BATCHES} batches.*rl_bands"):
        run.go()
    assert runtime.trained == [] and runtime.learner_version == 0
    fates = run.state.ledger.to_json(1.0)["samples"]
    assert fates["filtered"] == 8 * MAX_EMPTY_BATCHES == 8 * run.state.meter.counts["suspicions"]


@pytest.mark.parametrize("limit", [0, 2])
def test_empty_batches_between_good_ones_are_filtered_and_the_run_goes_on(run_of, limit):
    runtime = SleepyRuntime(
        limit, 1, {"play": 0.001}, outcome=lambda serial, i: float(i % 2) * (serial // 4 % 2)
    )
    run = run_of(runtime, buffer={"order": "fifo"}).go()
    assert runtime.learner_version == 8
    accounts_balance(run)
    assert run.state.ledger.to_json(1.0)["samples"]["filtered"] >= 8


def test_groups_without_contrast_are_refilled(run_of):
    runtime = SleepyRuntime(
        1, 1, {"play": 0.001, "train": 0.001}, lambda serial, i: float(i % 2 and serial % 2)
    )
    run = run_of(runtime, filter="zero_variance").go()
    assert all(int(i.split(".")[0]) % 2 for i in runtime.trained)
    assert all(m["values"]["mixed_groups_share"] == 1 for m in run.metrics)
    accounts_balance(run)
    assert run.state.ledger.to_json(1.0)["samples"]["filtered"] >= 8 * 7


def test_a_filter_that_throws_everything_away_ends_the_run_by_name(run_of):
    runtime = SleepyRuntime(1, outcome=lambda serial, i: 1.0)
    run = run_of(runtime, filter="zero_variance", max_refill_factor=3)
    with pytest.raises(RefillLimitError, match=r"28 samples were filtered .*rl_bands"):
        run.go()  # 3 batches of 8 may go, the seventh group is one too many
    assert runtime.trained == []


def test_refused_samples_are_left_out_and_their_group_goes_on(run_of):
    runtime = SleepyRuntime(1, 1, {"play": 0.001, "train": 0.001})
    runtime.refuses = lambda serial, i: serial % 2 == 0 and i == 3
    run = run_of(runtime).go()
    assert not any(i.endswith(".3") and int(i.split(".")[0]) % 2 == 0 for i in runtime.trained)
    counts = run.state.meter.counts
    assert counts["refused_samples"] == run.state.ledger.to_json(1.0)["samples"]["refused"] > 0
    assert counts["samples"] == len(runtime.trained) < 64
    accounts_balance(run, refused=True)


def test_an_engine_whose_every_answer_is_refused_ends_the_run_by_name(run_of):
    runtime = SleepyRuntime(1)
    runtime.refuses = lambda serial, i: True
    with pytest.raises(RefillLimitError, match=r"samples were refused .*Check the engine"):
        run_of(runtime).go()


def test_a_grader_that_answers_for_fewer_is_named(run_of):
    runtime = SleepyRuntime(0)
    grade = runtime.grade

    async def forgets_one(worker, rollouts):
        return await grade(worker, rollouts[:-1])

    runtime.grade = forgets_one
    with pytest.raises(RewardShapeError, match=r"group 1 \(row row\d+\).*3 of 4 samples"):
        run_of(runtime).go()
