"""Intervals against values worked out by hand."""

import math

import numpy as np
import pytest

from tasks.artifacts.bootstrap import BootstrapInputError, bootstrap_mean, paired_bootstrap


def test_value_is_the_sample_mean_and_interval_matches_the_normal_one():
    values = np.array([0.0] * 500 + [1.0] * 500)
    interval = bootstrap_mean(values, resamples=4000, seed=1)
    assert interval.value == 0.5
    half = 1.96 * 0.5 / math.sqrt(1000)  # 0.0310
    assert interval.low == pytest.approx(0.5 - half, abs=0.003)
    assert interval.high == pytest.approx(0.5 + half, abs=0.003)


def test_pairing_cancels_what_is_common():
    rng = np.random.default_rng(0)
    b = rng.integers(0, 2, 2000).astype(float)
    a = b.copy()
    a[:20] = 1 - a[:20]  # twenty problems change
    gained, lost = int((a > b).sum()), int((a < b).sum())
    interval = paired_bootstrap(a, b, resamples=2000, seed=0)
    assert interval.value == pytest.approx((gained - lost) / 2000)
    # variance of one difference is at most 20/2000, so the half-width is at most 1.96·√(0.01/2000)
    assert interval.high - interval.low < 2 * 1.96 * math.sqrt(0.01 / 2000) * 1.1
    unpaired_half = 1.96 * math.sqrt(2 * 0.25 / 2000)
    assert interval.high - interval.low < unpaired_half


def test_identical_scores_give_exactly_zero():
    scores = np.array([1.0, 0.0, 1.0])
    assert paired_bootstrap(scores, scores, resamples=50, seed=3) == (0.0, 0.0, 0.0)


def test_one_problem_has_no_spread():
    assert bootstrap_mean(np.array([0.25]), resamples=10, seed=0) == (0.25, 0.25, 0.25)


def test_same_seed_same_interval_other_seed_another():
    values = np.arange(30.0)
    first = bootstrap_mean(values, resamples=200, seed=5)
    assert first == bootstrap_mean(values, resamples=200, seed=5)
    assert first != bootstrap_mean(values, resamples=200, seed=6)


def test_samples_of_a_problem_are_averaged_first():
    a = np.array([[1.0, 0.0], [1.0, 1.0]])  # 0.5, 1.0
    b = np.array([[0.0], [1.0]])
    assert paired_bootstrap(a, b, resamples=100, seed=0).value == pytest.approx(0.25)


def test_weighted_mean_is_the_token_mean():
    interval = bootstrap_mean(
        np.array([1.0, 3.0]), weights=np.array([3.0, 1.0]), resamples=500, seed=0
    )
    assert interval.value == pytest.approx(1.5)  # (3·1 + 1·3) / 4
    assert interval.low == 1.0 and interval.high == 3.0  # both drawn twice with chance 1/4


def test_a_unit_of_weight_zero_never_counts():
    interval = bootstrap_mean(
        np.array([1.0, 99.0]), weights=np.array([2.0, 0.0]), resamples=20, seed=0
    )
    assert interval == (1.0, 1.0, 1.0)


def test_chunks_do_not_change_how_many_resamples(monkeypatch):
    monkeypatch.setattr("tasks.artifacts.bootstrap._CELLS_AT_ONCE", 70)
    values = np.arange(10.0)  # 7 resamples at once, the last chunk cut short
    interval = bootstrap_mean(values, resamples=1000, seed=0)
    half = 1.96 * values.std() / math.sqrt(10)
    assert interval.low == pytest.approx(4.5 - half, abs=0.35)
    assert interval.high == pytest.approx(4.5 + half, abs=0.35)


@pytest.mark.parametrize("bad", [np.array([]), np.array([1.0, np.nan]), np.array([np.inf])])
def test_empty_and_not_finite_are_refused(bad):
    with pytest.raises(BootstrapInputError):
        bootstrap_mean(bad, resamples=10, seed=0)


def test_nan_names_its_place():
    with pytest.raises(BootstrapInputError, match=r"a\[1\]=nan"):
        paired_bootstrap(np.array([1.0, np.nan]), np.array([1.0, 1.0]), resamples=10, seed=0)


def test_unequal_problems_are_refused():
    with pytest.raises(BootstrapInputError, match="3 problems and b has 2"):
        paired_bootstrap(np.ones(3), np.ones(2), resamples=10, seed=0)


def test_bad_weights_are_refused():
    for weights in (np.array([1.0]), np.array([-1.0, 1.0]), np.zeros(2)):
        with pytest.raises(BootstrapInputError, match="weight"):
            bootstrap_mean(np.ones(2), weights=weights, resamples=10, seed=0)


def test_no_resamples_is_refused():
    with pytest.raises(BootstrapInputError, match="resamples=0"):
        bootstrap_mean(np.ones(2), resamples=0, seed=0)
