"""The reward sentinel: what is suspicious, what trips, what is never trained on."""

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.rl import SentinelConfig
from tasks.rl.credit import NonFiniteRewardError
from tasks.rl.sentinel import (
    Decision,
    EmptyBatchError,
    NoProbesError,
    ProbeResult,
    RewardSentinel,
    SentinelTrippedError,
    SuspicionKind,
)

CONFIG = SentinelConfig(warmup_batches=3, max_unscored_share=0.2, drift_sigmas=6.0)
RIGHT = [ProbeResult("known_right", 1.0, 1.0), ProbeResult("known_wrong", 0.0, 0.0)]
BROKEN = [ProbeResult("known_right", 1.0, 0.0), ProbeResult("known_wrong", 0.0, 0.0)]
SILENT = [ProbeResult("known_right", 1.0, None)]


def batch_with_mean(mean, size=100):
    """`size` outcomes of 0 and 1 with this mean."""
    ones = round(mean * size)
    return [1.0] * ones + [0.0] * (size - ones)


def warmed_up(means=(0.3, 0.32, 0.28)):
    """A sentinel past its warm-up."""
    sentinel = RewardSentinel(CONFIG)
    assert all(sentinel.observe(batch_with_mean(mean)) is None for mean in means)
    return sentinel


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0.0] * 8, SuspicionKind.ALL_ZERO),
        ([0.0, None, None, 0.0], SuspicionKind.ALL_ZERO),
        ([1.0] * 8, SuspicionKind.ALL_ONE),
        ([0.05] * 8, SuspicionKind.ALL_ONE),
        ([-1.0] * 8, SuspicionKind.ALL_ONE),
        ([1.0], SuspicionKind.ALL_ONE),
        ([None] * 8, SuspicionKind.UNSCORED),
        ([1.0, 0.0, None], SuspicionKind.UNSCORED),
        ([1.0, 1.0, None], SuspicionKind.UNSCORED),
    ],
)
def test_suspicious_from_the_first_batch(rewards, kind):
    assert RewardSentinel(CONFIG).observe(rewards).kind is kind


@pytest.mark.parametrize(
    "rewards", [[1.0, 0.0], [0.0, 1e-9], [1.0, 0.0, 1.0, 0.0, None], [1.0, 0.0] * 4 + [None] * 2]
)
def test_unsuspicious(rewards):
    # One of five and two of ten unscored are 20 %, which does not pass the limit of 20 %.
    assert RewardSentinel(CONFIG).observe(rewards) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a04_a_non_finite_reward_is_an_error(bad):
    with pytest.raises(NonFiniteRewardError):
        RewardSentinel(CONFIG).observe([1.0, bad])


def test_an_empty_batch_is_an_error():
    with pytest.raises(EmptyBatchError):
        RewardSentinel(CONFIG).observe([])


def test_drift_by_hand():
    # Means .30, .32, .28: mean .3, population deviation √(.0008/3) = .0163. The larger is the
    # standard error of 100 outcomes: at .5 it is .05, so .5 is 4 off; at .8 it is .04: 12.5 off.
    sentinel = warmed_up()
    assert sentinel.observe(batch_with_mean(0.5)) is None
    suspicion = warmed_up().observe(batch_with_mean(0.8))
    assert suspicion.kind is SuspicionKind.DRIFT
    assert "12.5 deviations" in suspicion.detail


def test_drift_downwards_and_by_running_deviation():
    # 10 000 outcomes: standard error .003; the running deviation .0163 is larger: .2/.0163 = 12.2
    suspicion = warmed_up().observe(batch_with_mean(0.1, 10_000))
    assert suspicion.kind is SuspicionKind.DRIFT
    assert "12.2 deviations" in suspicion.detail
    assert warmed_up().observe(batch_with_mean(0.25, 10_000)) is None


def test_drift_waits_for_the_warm_up():
    sentinel = RewardSentinel(CONFIG)
    assert sentinel.observe(batch_with_mean(0.02)) is None
    assert sentinel.observe(batch_with_mean(0.98)) is None


def test_honest_progress_is_not_drift():
    # 0.16 → 0.80 over 60 batches of 128, as a run that learns well does.
    sentinel = RewardSentinel(CONFIG)
    means = [0.16 + 0.64 * step / 60 for step in range(61)]
    assert [m for m in means if sentinel.observe(batch_with_mean(m, 128))] == []


def test_a_suspicious_batch_moves_the_statistics_only_once_accepted():
    sentinel = warmed_up()
    before = sentinel.state_dict()
    suspicion = sentinel.observe(batch_with_mean(0.8))
    assert sentinel.state_dict() == before
    assert sentinel.judge(suspicion, RIGHT) is Decision.TRAIN
    # Welford: (.3·3 + .8)/4 = .425
    assert sentinel.state_dict()["mean"] == pytest.approx(0.425)


def test_running_statistics_are_welfords_until_memory_is_full():
    sentinel = RewardSentinel(CONFIG, memory=4)
    for mean in (0.2, 0.4, 0.3, 0.5):
        sentinel.observe(batch_with_mean(mean))
    # mean .35, population variance (.15² + .05² + .05² + .15²)/4 = .0125
    state = sentinel.state_dict()
    assert (state["mean"], state["variance"]) == pytest.approx((0.35, 0.0125))
    sentinel.observe(batch_with_mean(0.55))
    # weight stays 1/4: .35 + .2/4 = .4; ¾(.0125 + ¼·.04) = .016875
    state = sentinel.state_dict()
    assert (state["mean"], state["variance"]) == pytest.approx((0.4, 0.016875))


def test_e6_all_zero_is_never_trained_on_and_does_not_trip():
    sentinel = RewardSentinel(CONFIG)
    for drops in range(1, 6):
        suspicion = sentinel.observe([0.0] * 8)
        assert sentinel.judge(suspicion, RIGHT) is Decision.DROP_AND_CONTINUE
        assert sentinel.consecutive_drops == drops
    assert not sentinel.tripped
    assert sentinel.observe([1.0, 0.0]) is None
    assert sentinel.consecutive_drops == 0


def test_e6_nothing_scored_is_dropped_and_all_one_is_trained_on():
    sentinel = RewardSentinel(CONFIG)
    nothing = sentinel.observe([None, None])
    assert sentinel.judge(nothing, RIGHT) is Decision.DROP_AND_CONTINUE
    saturated = sentinel.observe([1.0, 1.0])
    assert sentinel.judge(saturated, RIGHT) is Decision.TRAIN


@pytest.mark.parametrize("probes", [BROKEN, SILENT, [*RIGHT, *SILENT]])
@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [None] * 4, [1.0, 0.0, None]])
def test_e6_a_failed_probe_trips_whatever_the_suspicion(rewards, probes):
    sentinel = RewardSentinel(CONFIG)
    assert sentinel.judge(sentinel.observe(rewards), probes) is Decision.TRIP
    assert sentinel.tripped
    # and nothing is looked at, let alone trained on, until the grader passes
    with pytest.raises(SentinelTrippedError, match="known_right") as caught:
        sentinel.observe([1.0, 0.0])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_e6_without_probes_nothing_is_known():
    sentinel = RewardSentinel(CONFIG)
    suspicion = sentinel.observe([0.0])
    with pytest.raises(NoProbesError):
        sentinel.judge(suspicion, [])
    assert not sentinel.tripped


def test_e6_a_resumed_run_stays_tripped_until_the_grader_passes():
    sentinel = RewardSentinel(CONFIG)
    sentinel.judge(sentinel.observe([0.0]), BROKEN)
    again = RewardSentinel(CONFIG)
    again.load_state(json.loads(json.dumps(sentinel.state_dict())))
    with pytest.raises(SentinelTrippedError):
        again.observe([1.0, 0.0])
    with pytest.raises(SentinelTrippedError):
        again.rearm(BROKEN)
    with pytest.raises(NoProbesError):
        again.rearm([])
    assert again.tripped
    again.rearm(RIGHT)
    assert again.observe([1.0, 0.0]) is None


def test_state_survives_a_resume_to_the_bit():
    sentinel = warmed_up((0.1, 0.33, 0.27))
    again = RewardSentinel(CONFIG)
    again.load_state(json.loads(json.dumps(sentinel.state_dict())))
    assert again.state_dict() == sentinel.state_dict()
    assert again.observe(batch_with_mean(0.9)) == sentinel.observe(batch_with_mean(0.9))


@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12),
        max_size=20,
    )
)
def test_e6_a_healthy_grader_never_trips_whatever_the_rewards(batches):
    sentinel = RewardSentinel(CONFIG)
    for rewards in batches:
        suspicion = sentinel.observe(rewards)
        scored = [r for r in rewards if r is not None]
        if suspicion is None:
            assert any(scored)
        else:
            decision = sentinel.judge(suspicion, RIGHT)
            assert (decision is Decision.TRAIN) == any(scored)
    assert not sentinel.tripped
