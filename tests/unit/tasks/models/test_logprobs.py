"""Tempered log-probabilities against values worked out by hand (A06) and finite differences."""

import math

import pytest
import torch

from tasks.models.logprobs import score_tokens, tempered_logprobs


def test_a06_temperature_divides_logits_not_logprobs():
    # Logits (2, 0) at T = ½ are (4, 0): −log(1 + e^−4) = −0.01815 and −4.01815. Dividing the
    # log-probability instead gives −0.25386, forgetting T gives −0.12693.
    logits = torch.tensor([[2.0, 0.0]]).repeat(2, 1)
    scores = score_tokens(logits, torch.tensor([0, 1]), torch.full((2,), 0.5))
    assert scores.logprobs_N.tolist() == pytest.approx([-0.01815, -4.01815], abs=1e-5)
    assert scores.logprobs_N.exp().sum().item() == pytest.approx(1.0)


def test_a06_each_row_has_its_own_temperature():
    # Row 0 at T = ½, row 1 at T = 1: −0.01815 and −log(1 + e^−2) = −0.12693.
    logits = torch.tensor([[[2.0, 0.0], [9.0, 9.0]]]).repeat(2, 1, 1)
    logprobs = tempered_logprobs(
        logits, torch.zeros(2, 2, dtype=torch.long), torch.tensor([0.5, 1])
    )
    assert logprobs[:, 1].tolist() == pytest.approx([-0.01815, -0.12693], abs=1e-5)


def test_a_token_is_predicted_by_the_position_before_it():
    # Position 0 has no prediction; position 1 comes from logits 0, position 2 from logits 1; the
    # last logits predict nothing in the sequence.
    logits = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0], [50.0, -50.0]]])
    logprobs = tempered_logprobs(logits, torch.tensor([[1, 0, 0]]), torch.ones(1))
    assert logprobs.tolist()[0] == pytest.approx([0.0, math.log(1 / 2), math.log(3 / 4)])


def test_token_id_zero_is_a_token_like_any_other():
    logits = torch.tensor([[[math.log(3.0), 0.0]] * 2])
    assert tempered_logprobs(logits, torch.zeros(1, 2, dtype=torch.long), torch.ones(1))[
        0, 1
    ].item() == pytest.approx(math.log(3 / 4))


def test_one_token_alone_has_no_prediction():
    assert tempered_logprobs(
        torch.zeros(2, 1, 3), torch.zeros(2, 1, dtype=torch.long), torch.ones(2)
    ).tolist() == [[0.0], [0.0]]


def test_large_logits_and_half_precision_stay_finite():
    logits = torch.tensor([[[3e4, 0.0], [0.0, 0.0]]], dtype=torch.bfloat16)
    logprobs = tempered_logprobs(logits, torch.tensor([[0, 1]]), torch.tensor([0.5]))
    assert logprobs.dtype == torch.float32
    assert logprobs[0, 1].item() == pytest.approx(-59904.0)  # 3e4 is 29952 in bfloat16


def test_entropy_by_hand():
    # Uniform over 4: log 4. Probabilities (¾, ¼): .56234. At a tiny temperature: 0.
    logits = torch.tensor([[0.0] * 4, [math.log(3.0), 0.0, -1e9, -1e9], [1.0, 0.0, 0.0, 0.0]])
    entropy = score_tokens(
        logits, torch.zeros(3, dtype=torch.long), torch.tensor([1.0, 1.0, 1e-3])
    ).entropy_N
    assert entropy.tolist() == pytest.approx([math.log(4), 0.56234, 0.0], abs=1e-5)


def test_gradient_matches_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, requires_grad=True)
    ids, temperature = torch.randint(4, (2, 3)), torch.tensor([0.7, 1.3])
    weights = torch.randn(2, 3)
    (tempered_logprobs(logits, ids, temperature) * weights).sum().backward()
    h = 1e-2
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        moved = [logits.detach().clone() for _ in range(2)]
        moved[0][tuple(index)] += h
        moved[1][tuple(index)] -= h
        high, low = ((tempered_logprobs(m, ids, temperature) * weights).sum() for m in moved)
        numeric = ((high - low) / (2 * h)).item()
        assert logits.grad[tuple(index)].item() == pytest.approx(numeric, abs=1e-3)
