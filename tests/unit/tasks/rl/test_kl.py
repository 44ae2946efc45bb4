"""KL estimators, the loss and its gradient, and the penalty in the reward."""

import math

import pytest
import torch

from tasks.rl.kl import k1, k1_in_reward, k2, k3, kl_loss, sequence_k1
from tasks.rl.losses import merge_metrics, summarise
from tasks.rl.types import TrainBatch


def make_batch(sampler_B_T, mask_B_T=None):
    """A batch of which the KL loss reads the sampler's logprobs and the mask."""
    mask_B_T = torch.ones_like(sampler_B_T, dtype=torch.bool) if mask_B_T is None else mask_B_T
    return TrainBatch(
        token_ids_B_T=torch.ones_like(sampler_B_T, dtype=torch.int64),
        valid_B_T=torch.ones_like(mask_B_T),
        action_mask_B_T=mask_B_T,
        sampler_logprobs_B_T=sampler_B_T,
        advantages_B_T=torch.zeros_like(sampler_B_T),
        temperature_B=torch.ones(sampler_B_T.shape[0]),
    )


def test_estimators_by_hand():
    # log π = −1, log π_ref = −1.5: d = −.5; k1 = .5, k2 = .125, k3 = e^−.5 + .5 − 1 = .106531
    policy, ref = torch.tensor(-1.0), torch.tensor(-1.5)
    assert k1(policy, ref).item() == 0.5
    assert k2(policy, ref).item() == 0.125
    assert k3(policy, ref).item() == pytest.approx(0.106531, abs=1e-6)


def test_estimators_are_clamped():
    # d = ±99 → ±20: k1 = ∓20, k2 = 200; k3(20) = e^20 − 21 → 10, k3(−20) = e^−20 + 19 → 10
    policy, ref = torch.tensor([-100.0, -1.0]), torch.tensor([-1.0, -100.0])
    assert k1(policy, ref).tolist() == [-20.0, 20.0]
    assert k2(policy, ref).tolist() == [200.0, 200.0]
    assert k3(policy, ref).tolist() == [10.0, 10.0]


def test_nan_stays_visible_in_every_estimator():
    nan, one = torch.tensor(math.nan), torch.tensor(-1.0)
    assert all(k(nan, one).isnan() and k(one, nan).isnan() for k in (k1, k2, k3))


def test_k1_and_k3_are_unbiased_over_an_enumerated_vocabulary():
    policy, ref = _two_policies()
    exact = (policy.exp() * (policy - ref)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, ref)).sum(), exact)
    assert (k3(policy, ref) >= 0).all()
    # k2 is not: that is why it is never reported as the KL.
    assert abs((policy.exp() * k2(policy, ref)).sum() - exact) > 1e-3


@pytest.mark.parametrize("off_policy", [False, True])
def test_gradient_of_the_loss_is_the_gradient_of_the_kl(off_policy):
    # One row a token of the vocabulary, weighted by the sampler's probability: the expectation
    # under μ, summed exactly.
    logits = torch.tensor([0.4, -1.0, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.7, 1.1], dtype=torch.float64), dim=0)
    sampler = torch.log_softmax(
        torch.tensor([1.0, 0.2, -0.3, 0.1], dtype=torch.float64) if off_policy else logits, dim=0
    ).detach()
    policy = torch.log_softmax(logits, dim=0)
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    expectation = sum(
        sampler[v].exp()
        * kl_loss(
            policy[v].reshape(1, 1), ref[v].reshape(1, 1), make_batch(sampler[v].reshape(1, 1)), 1.0
        ).loss
        for v in range(4)
    )
    gradient = torch.autograd.grad(expectation, logits, retain_graph=True)[0]
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-6)
    # Differentiating the value estimator k3 instead would be wrong.
    wrong = torch.autograd.grad((sampler.exp() * k3(policy, ref)).sum(), logits)[0]
    assert (wrong - exact).abs().max() > 1e-2


def test_loss_by_hand_off_policy():
    # π_θ/μ = e^(−1 + 2) = e; k2 = ½·.5² = .125; two trained tokens, the other on-policy with d = 0.
    learner = torch.tensor([[-1.0, -1.0, -3.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    output = kl_loss(learner, ref, make_batch(torch.tensor([[-2.0, -1.0, math.inf]]), mask), 2.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.e * 0.125 / 2, rel=1e-6)
    # d k2 / d log π = log π − log π_ref = .5, times the constant weight e, over 2.
    assert learner.grad.tolist()[0] == pytest.approx([math.e * 0.5 / 2, 0.0, 0.0], rel=1e-6)
    shares = summarise(merge_metrics([output.metrics]))
    assert shares["kl_k1_mean"] == pytest.approx(math.e * 0.5 / 2, rel=1e-6)
    assert shares["kl_k3_mean"] == pytest.approx(math.e * 0.106531 / 2, rel=1e-5)


def test_a05_identical_policies_have_exactly_zero_kl_and_gradient():
    learner = torch.tensor([[-0.3, -7.1]], requires_grad=True)
    output = kl_loss(learner, learner.detach().clone(), make_batch(learner.detach()), 2.0)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert learner.grad.tolist() == [[0.0, 0.0]]
    assert output.metrics["kl_k3_sum"] == 0.0


def test_a05_no_gradient_reaches_the_reference():
    ref = torch.tensor([[-2.0]], requires_grad=True)
    learner = torch.tensor([[-1.0]], requires_grad=True)
    kl_loss(learner, ref, make_batch(torch.tensor([[-1.0]])), 1.0).loss.backward()
    assert ref.grad is None
    assert learner.grad.item() == 1.0


def test_a01_extreme_references_leave_the_loss_finite():
    learner = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    ref = torch.tensor([[-math.inf, -1e30]])
    output = kl_loss(learner, ref, make_batch(torch.tensor([[-1.0, -1.0]])), 1.0)
    output.loss.backward()
    assert output.loss.item() == 400.0
    assert learner.grad.isfinite().all()


def test_a03_all_masked_is_zero():
    learner = torch.tensor([[-1.0]], requires_grad=True)
    batch = make_batch(torch.tensor([[math.nan]]), torch.tensor([[False]]))
    output = kl_loss(learner, torch.tensor([[math.nan]]), batch, 0.0)
    output.loss.backward()
    assert (output.loss.item(), learner.grad.item()) == (0.0, 0.0)


def test_gradient_matches_finite_differences():
    torch.manual_seed(4)
    sampler, ref = -torch.rand(2, 4) * 2, -torch.rand(2, 4) * 2
    learner = (sampler + 0.2 * torch.randn(2, 4)).requires_grad_()
    batch = make_batch(sampler, torch.rand(2, 4) > 0.3)
    kl_loss(learner, ref, batch, 5.0).loss.backward()
    weight = (learner.detach() - sampler).exp()

    def loss_at(b, t, shift):
        # sg(π_θ/μ) is a constant of the step, so only k2 moves.
        moved = learner.detach().double()
        moved[b, t] += shift
        per_token = weight * (moved - ref).square() / 2
        return per_token[batch.action_mask_B_T].sum() / 5

    for b in range(2):
        for t in range(4):
            numeric = (loss_at(b, t, 1e-4) - loss_at(b, t, -1e-4)) / 2e-4
            assert learner.grad[b, t].item() == pytest.approx(numeric.item(), abs=1e-5)


def test_k1_in_reward_by_hand():
    # Row 0: (−1 + 1.5) + (−2 + 1) = −.5; row 1: one action, −1 + 3 = 2.
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, math.nan]])
    ref = torch.tensor([[-1.5, -1.0], [-3.0, math.nan]])
    penalties = sequence_k1(logprobs, ref, torch.tensor([[True, True], [True, False]]))
    assert penalties.tolist() == [-0.5, 2.0]
    assert k1_in_reward([1.0, None], penalties.tolist(), 0.1) == [pytest.approx(1.05), None]
    assert k1_in_reward([], [], 0.1) == []
    with pytest.raises(ValueError):
        k1_in_reward([1.0], [], 0.1)


def _two_policies():
    policy = torch.log_softmax(torch.tensor([0.4, -1.0, 0.3], dtype=torch.float64), dim=0)
    return policy, torch.log_softmax(torch.tensor([0.0, 0.8, -0.7], dtype=torch.float64), dim=0)
