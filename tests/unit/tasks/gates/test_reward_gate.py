"""The reward suite: missing, infinite, mean, variance, saturation."""

import math

import pytest

from tasks.gates.rewards import RewardLimits, gate_rewards

STRICT = RewardLimits(
    max_missing_share=0.25, min_mean=0.1, max_mean=0.9, min_std=0.1, max_saturated_share=0.8
)


def failed(rewards, limits=STRICT):
    return {check.code for check in gate_rewards(rewards, limits).failed_checks}


def test_a_healthy_batch_passes():
    assert failed([0.0, 1.0, 0.5, 1.0]) == set()


def test_none_and_nan_are_missing_and_leave_the_statistics():
    assert failed([0.0, 1.0, 0.5, None]) == set()  # a quarter is allowed
    assert failed([0.0, 1.0, None, math.nan]) == {"missing"}
    verdict = gate_rewards([0.5, math.nan, None, 0.8, 0.6, 0.7], RewardLimits(min_mean=0.0))
    mean = next(check for check in verdict.checks if check.code == "mean")
    assert mean.observed == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("rewards", "codes"),
    [
        ([0.0] * 4, {"mean", "variance", "saturated_at_floor"}),
        ([1.0] * 4, {"mean", "variance", "saturated_at_ceiling"}),
        ([0.5] * 4, {"variance"}),
        ([0.0, 1.0, 1.5, 0.5], {"range"}),
    ],
)
def test_constant_and_foreign_batches_fail(rewards, codes):
    assert failed(rewards) == codes


def test_infinity_is_named_with_its_row():
    verdict = gate_rewards([0.5, math.inf], RewardLimits(), ["a", "b"])
    assert ("b", "infinite") in {(f.row, f.code) for f in verdict.row_failures}


@pytest.mark.parametrize("rewards", [[], [None, None], [math.nan]])
def test_a23_nothing_scored_fails(rewards):
    assert gate_rewards(rewards, RewardLimits(max_missing_share=0.5)).passed is False
    assert gate_rewards(rewards, RewardLimits(max_missing_share=1.0)).passed is False
