"""Parity figures against values worked out by hand."""

import math

import numpy as np
import pytest

from configs.schema.quantize import QuantGate
from quantize.errors import ParityError
from quantize.parity import (
    Parity,
    SequenceParity,
    action_rows,
    attribution,
    compare,
    f16_problem,
    kl_difference,
    summarise,
    token_kl,
    verdict,
)
from tasks.artifacts.bootstrap import Interval

GATE = QuantGate(accuracy_ci_low=-0.03, max_kld=0.1, min_top1=0.9)


def parity(kld=0.01, top1=0.95, ppl=1.0):
    return Parity(*(Interval(x, x, x) for x in (kld, top1, ppl)), tokens=100, sequences=10)


def test_kl_of_two_coins():
    p = np.log(np.array([[0.5, 0.5]]))
    q = np.log(np.array([[0.25, 0.75]])) + 7.0  # a shift of the logits changes nothing
    found = compare(p, q, np.array([1]))
    assert found.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert found.tokens == 1
    assert found.nll_p == pytest.approx(math.log(2))
    assert found.nll_q == pytest.approx(-math.log(0.75))


def test_kl_is_of_p_against_q_not_the_other_way():
    p = np.log(np.array([[0.9, 0.1]]))
    q = np.log(np.array([[0.5, 0.5]]))
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert compare(p, q, np.array([0])).kl == pytest.approx(forward)


def test_same_logits_give_zero_and_full_agreement():
    logits = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32)
    found = compare(logits, logits, np.arange(5))
    assert found.kl == 0.0 and found.same_top == 5 and found.nll_p == found.nll_q


def test_top_one_counts_rows():
    p = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    q = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    assert compare(p, q, np.zeros(3, int)).same_top == 2


def test_huge_logits_do_not_overflow():
    p, q = np.array([[1e4, 0.0]]), np.array([[0.0, 1e4]])
    assert compare(p, q, np.array([0])).kl == pytest.approx(1e4)


def test_no_sampled_token_is_zero_sums():
    empty = np.empty((0, 4), np.float32)
    assert compare(empty, empty, np.empty(0, int)) == (0, 0.0, 0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(ParityError, match="NaN"):
        compare(np.zeros((1, 2)), np.array([[0.0, bad]]), np.array([0]))


def test_shapes_must_agree():
    with pytest.raises(ParityError, match="shape"):
        compare(np.zeros((1, 2)), np.zeros((1, 3)), np.array([0]))


def test_rows_are_one_before_the_tokens_they_predict():
    rows = action_rows([5, 6, 7, 8], [False, False, True, True])
    assert rows.tolist() == [False, True, True, False]
    # nothing predicts the first token, even where the mask claims it
    assert action_rows([5, 6], [True, False]).tolist() == [False, False]
    with pytest.raises(ParityError, match="2 entries and action_mask 1"):
        action_rows([5, 6], [True])


def test_means_weigh_tokens_not_sequences():
    one = SequenceParity(tokens=1, kl=0.9, same_top=0, nll_p=1.0, nll_q=2.0)
    nine = SequenceParity(tokens=9, kl=0.9, same_top=9, nll_p=9.0, nll_q=9.0)
    found = summarise([one, nine, SequenceParity(0, 0.0, 0, 0.0, 0.0)])
    assert found.kld.value == pytest.approx(0.18)
    assert found.top1.value == pytest.approx(0.9)
    assert found.ppl_ratio.value == pytest.approx(math.exp(0.1))
    assert (found.tokens, found.sequences) == (10, 2)
    assert found.kld.low == pytest.approx(0.1) and found.kld.high == pytest.approx(0.9)
    assert found.ppl_ratio.low == pytest.approx(1.0)


def test_nothing_sampled_at_all_is_an_error():
    with pytest.raises(ParityError, match="action_mask"):
        summarise([SequenceParity(0, 0.0, 0, 0.0, 0.0)])
    with pytest.raises(ParityError):
        summarise([])


def test_f16_gate():
    assert f16_problem(parity(1e-4, 0.995), 1e-4, 0.995) is None
    assert "max_f16_kld" in f16_problem(parity(2e-4, 1.0), 1e-4, 0.995)
    assert "top-1" in f16_problem(parity(1e-6, 0.99), 1e-4, 0.995)
    assert f16_problem(parity(float("nan"), 1.0), 1e-4, 0.995) is not None


def test_verdict_is_on_the_interval_not_on_the_point():
    good = verdict(parity(), Interval(-0.02, -0.0299, -0.01), GATE)
    assert good.ships and good.why.startswith("ships: accuracy -2.00 points")
    wide = verdict(parity(), Interval(0.0, -0.031, 0.031), GATE)
    assert not wide.ships
    assert wide.why.startswith("rejected: accuracy may have fallen by 3.10 points")
    assert "the gate allows 3" in wide.why


def test_the_edge_of_a_gate_ships():
    assert verdict(parity(0.1, 0.9), Interval(0.0, -0.03, 0.0), GATE).ships


@pytest.mark.parametrize(
    ("found", "word"), [(parity(kld=0.2), "mean KL 0.2"), (parity(top1=0.5), "50.00 %")]
)
def test_each_gate_rejects_alone_with_its_number(found, word):
    judged = verdict(found, Interval(0.0, -0.01, 0.01), GATE)
    assert not judged.ships and word in judged.why and judged.why.count(";") == 0


def test_every_reason_is_named():
    why = verdict(parity(kld=0.2, top1=0.5), Interval(-0.5, -0.6, -0.4), GATE).why
    assert why.count(";") == 2


def test_nan_never_ships():
    nan = float("nan")
    assert not verdict(parity(kld=nan), Interval(0.0, 0.0, 0.0), GATE).ships
    assert not verdict(parity(), Interval(nan, nan, nan), GATE).ships


UP, FLAT, DOWN = Interval(0.6, 0.5, 0.7), Interval(0.0, -0.01, 0.01), Interval(-0.1, -0.15, -0.05)


@pytest.mark.parametrize(
    ("rl", "quants", "said"),
    [
        (UP, {"Q8_0": FLAT}, "RL gained accuracy, and no quantisation shows a loss beyond chance"),
        (UP, {"Q8_0": FLAT, "IQ2_M": DOWN}, "the loss with IQ2_M comes from quantisation"),
        (DOWN, {"Q8_0": FLAT}, "RL lost accuracy, and no quantisation shows a loss beyond chance"),
        (DOWN, {"IQ2_M": DOWN}, "RL lost accuracy, and quantisation lost more with IQ2_M"),
        (FLAT, {"Q8_0": UP}, "RL moved accuracy by no more than chance, and no quantisation lost"),
        (None, {"Q8_0": DOWN}, "was not measured, and the loss with Q8_0 comes from quantisation"),
    ],
)
def test_attribution_names_the_culprit_in_one_sentence(rl, quants, said):
    sentence = attribution(rl, quants)
    assert said in sentence
    assert sentence.endswith("95 % paired intervals.") and sentence.count(". ") == 0
    if rl is not None:
        assert f"RL {100 * rl.value:+.2f} points" in sentence


def test_attribution_shows_the_worst_quantisation():
    sentence = attribution(UP, {"Q8_0": FLAT, "IQ2_M": DOWN})
    assert "IQ2_M -10.00 points (-15.00 to -5.00)" in sentence


def sums(tokens: int, kl: float) -> SequenceParity:
    return SequenceParity(tokens, kl, tokens, 0.0, 0.0)


def test_kl_difference_is_paired_and_weighs_by_tokens():
    ours, theirs = [sums(2, 0.2), sums(1, 0.4)], [sums(2, 0.4), sums(1, 0.1)]
    found = kl_difference(ours, theirs)
    assert found.value == pytest.approx((0.2 - 0.4 + 0.4 - 0.1) / 3)
    assert (found.low, found.high) == pytest.approx((-0.1, 0.3))  # one of the two drawn twice


def test_what_is_hard_for_both_cancels_in_a_difference():
    hard = np.random.default_rng(0).gamma(0.3, size=50)
    ours, theirs = ([sums(1, float(k + e)) for k in hard] for e in (0.0, 0.01))
    assert kl_difference(ours, theirs) == pytest.approx((-0.01, -0.01, -0.01))
    assert summarise(ours).kld.high > summarise(theirs).kld.low  # apart, they could not be told


def test_sequences_without_tokens_do_not_enter_a_difference():
    one = [sums(0, 0.0), sums(4, 0.4)]
    assert kl_difference(one, [sums(0, 0.0), sums(4, 0.8)]).value == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([], [], "no sampled token"),
        ([sums(0, 0.0)], [sums(0, 0.0)], "no sampled token"),
        ([sums(1, 0.1)], [sums(1, 0.1)] * 2, "got 1 and 2"),
        ([sums(1, 0.1)], [sums(2, 0.1)], "other numbers of tokens"),
    ],
)
def test_differences_of_other_sequences_are_refused(ours, theirs, said):
    with pytest.raises(ParityError, match=said):
        kl_difference(ours, theirs)


def test_token_kl_of_two_coins():
    p, q = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    np.testing.assert_allclose(token_kl(p, q), [0.5 * np.log(2) + 0.5 * np.log(2 / 3), 0.0])
