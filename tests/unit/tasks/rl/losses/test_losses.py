"""Losses against numbers worked out by hand, finite differences, and the A01/A03 faults."""

import math

import pytest
import torch
from loss_batches import CONFIG, make_batch, rows_at_ratio, run

from configs.schema.rl_losses import PpoClip
from tasks.rl.losses import (
    DenominatorError,
    MissingTargetsError,
    merge_metrics,
    policy_denominator,
    policy_loss,
    summarise,
    value_denominator,
    value_loss,
)
from tasks.rl.types import TrainBatch

# --- A01: importance ratio overflow ---


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [3.0, None])
@pytest.mark.parametrize("log_ratio", [89.0, 88.0, -89.0, 1e4, -1e4, math.inf, -math.inf])
def test_a01_overflowing_ratio_leaves_loss_and_gradient_finite(log_ratio, advantage, dual_clip):
    batch = make_batch([[-2.0 - log_ratio, -1.0]], [[advantage, 1.0]])
    loss, gradient, metrics = run([[-2.0, -1.0]], batch, PpoClip(dual_clip=dual_clip))
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert metrics["clamped_tokens_sum"] == 1
    assert metrics["log_ratio_abs_max"] == abs(log_ratio)
    # A clamped token teaches nothing, on whichever side of the clip it lies.
    assert metrics["kept_tokens_sum"] == 1


def test_a01_reported_overflow_by_hand():
    # A = +1: min(r, 1.28) = 1.28 for the first token, 1 for the second: loss −(1.28 + 1)/2 = −1.14.
    # The clipped token pushes nothing; the healthy one pushes −1/2.
    loss, gradient, metrics = run([[-2.0, -1.0]], make_batch([[-91.0, -1.0]], [[1.0, 1.0]]))
    assert loss == pytest.approx(-1.14)
    assert gradient.tolist() == [[0.0, -0.5]]
    assert metrics["weight_max"] == pytest.approx(math.exp(20), rel=1e-6)
    assert metrics["log_ratio_abs_max"] == 89.0
    assert metrics["clamped_tokens_sum"] == 1


@pytest.mark.parametrize("poison", [-91.0, 1e38, math.nan, math.inf, -math.inf])
def test_a01_masked_token_is_exactly_absent(poison):
    # The poisoned position must equal dropping the token, in loss, gradient and every metric.
    masked = make_batch([[poison, -1.5]], [[math.nan, 0.5]], [[False, True]])
    alone = make_batch([[-1.5]], [[0.5]])
    loss, gradient, metrics = run([[-2.0, -1.0]], masked)
    loss_alone, gradient_alone, metrics_alone = run([[-1.0]], alone)
    assert loss == loss_alone
    assert gradient[0, 0] == 0.0
    assert gradient[0, 1] == gradient_alone[0, 0]
    assert {k: v.item() for k, v in metrics.items()} == {
        k: v.item() for k, v in metrics_alone.items()
    }


def test_a01_masked_learner_logprob_of_nan_is_absent_too():
    loss, gradient, _ = run(
        [[math.nan, -1.0]], make_batch([[-1.0, -1.0]], [[1.0, 1.0]], [[False, True]])
    )
    assert loss == -1.0
    assert gradient.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("where", ["learner", "sampler", "advantage"])
def test_a01_nan_on_a_trained_token_stays_visible(where):
    learner, sampler, advantage = (
        [[math.nan if where == name else value, other]]
        for name, value, other in (
            ("learner", -2.0, -1.0),
            ("sampler", -2.0, -1.0),
            ("advantage", 1.0, 1.0),
        )
    )
    loss, _, _ = run(learner, make_batch(sampler, advantage))
    assert loss.isnan()


def test_a01_healthy_tokens_are_unchanged_to_the_bit():
    torch.manual_seed(0)
    learner, sampler = -torch.rand(1, 64) * 3, -torch.rand(1, 64) * 3
    advantages = torch.randn(1, 64)
    poisoned = sampler.clone()
    poisoned[0, 0] = -200.0
    config, denominator = PpoClip(dual_clip=None), 64.0
    _, gradient, _ = run(
        learner.tolist(), make_batch(poisoned.tolist(), advantages.tolist()), config, denominator
    )
    # The same arithmetic with no clamp anywhere.
    plain = learner.clone().requires_grad_()
    ratio = (plain - sampler).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    (-objective.sum() / denominator).backward()
    assert torch.equal(gradient[:, 1:], plain.grad[:, 1:])


# --- the clip, by hand ---


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "pushes"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 1.0, -1.28, False),  # A > 0 above 1 + ε_h: clipped
        (1.25, 1.0, -1.25, True),  # A > 0 above 1 + ε_l, below 1 + ε_h: clip-higher lets it push
        (0.5, 1.0, -0.5, True),  # A > 0 below: min takes the ratio, so it still pushes
        (0.5, -1.0, 0.8, False),  # A < 0 below 1 − ε_l: clipped
        (1.5, -1.0, 1.5, True),  # A < 0 above: pushes
        (5.0, -1.0, 3.0, False),  # dual clip: max(−5, 3·−1) = −3
        (1.5, 0.0, 0.0, False),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, pushes):
    value, gradient, metrics = run(rows_at_ratio(ratio), make_batch([[-1.0]], [[advantage]]))
    assert value == pytest.approx(loss, rel=1e-6)
    # d(−r A)/d log π = −r A where the token pushes.
    assert gradient.item() == pytest.approx(-ratio * advantage if pushes else 0.0, rel=1e-6)
    active = advantage != 0
    assert metrics["advantage_tokens_sum"] == active
    assert metrics["kept_tokens_sum"] == pushes
    assert metrics["clipped_tokens_sum"] == (active and not pushes)


def test_without_dual_clip_a_bad_token_is_unbounded():
    loss, _, _ = run(rows_at_ratio(5.0), make_batch([[-1.0]], [[-1.0]]), PpoClip(dual_clip=None))
    assert loss == pytest.approx(5.0, rel=1e-6)


def test_policy_gradient_matches_finite_differences():
    torch.manual_seed(1)
    sampler = -torch.rand(3, 5) * 2
    batch = make_batch(
        sampler.tolist(), torch.randn(3, 5).tolist(), (torch.rand(3, 5) > 0.3).tolist()
    )
    learner = sampler + 0.1 * torch.randn(3, 5)  # inside and outside the clip
    _, gradient, _ = run(learner.tolist(), batch)
    denominator, h = policy_denominator([batch], CONFIG, 64), 1e-3

    def loss_at(b, t, shift):
        moved = learner.clone()
        moved[b, t] += shift
        return policy_loss(moved, batch, CONFIG, denominator).loss.double()

    for b in range(3):
        for t in range(5):
            numeric = (loss_at(b, t, h) - loss_at(b, t, -h)) / (2 * h)
            assert gradient[b, t].item() == pytest.approx(numeric.item(), abs=2e-4)


# --- A03: denominators ---


def test_a03_masked_completion_dilutes_nothing():
    # Lengths 4 (ended) and 16 (cut, masked); per-token loss 1 = −(1 · −1). 4/4, not 4/20.
    mask = [[t < 4 for t in range(16)], [False] * 16]
    batch = make_batch([[-1.0] * 16] * 2, [[-1.0] * 16] * 2, mask)
    loss, gradient, _ = run([[-1.0] * 16] * 2, batch)
    assert policy_denominator([batch], CONFIG, 64) == 4
    assert loss == 1.0
    assert torch.equal(gradient[1], torch.zeros(16))


@pytest.mark.parametrize("denominator", [0.0, 1.0, 128.0])
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 4), (2, 0)])
def test_a03_all_masked_is_zero_with_zero_gradient(denominator, shape):
    nothing = torch.full(shape, math.nan)
    batch = make_batch(nothing.tolist(), nothing.tolist(), torch.zeros(shape, dtype=bool).tolist())
    logprobs = torch.full(shape, -1.0, requires_grad=True)
    batch = TrainBatch(
        batch.token_ids_B_T,
        batch.valid_B_T,
        torch.zeros(shape, dtype=torch.bool),
        nothing,
        nothing,
        batch.temperature_B,
    )
    output = policy_loss(logprobs, batch, CONFIG, denominator)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert torch.equal(logprobs.grad, torch.zeros(shape))
    assert summarise(merge_metrics([output.metrics])) == {"weight_max": 0.0, "log_ratio_abs_max": 0}


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf])
def test_a03_trained_tokens_without_a_denominator_is_an_error(denominator):
    with pytest.raises(DenominatorError, match="denominator="):
        run([[-1.0]], make_batch([[-1.0]], [[1.0]]), denominator=denominator)


def test_a03_micro_batches_sum_to_the_one_shot_loss_by_hand():
    # 2 tokens of loss 1 and 8 of loss 0: token mean 2/10 = 0.2, not (1 + 0)/2 = 0.5
    first = make_batch([[-1.0] * 2], [[-1.0] * 2])
    second = make_batch([[-1.0] * 8], [[0.0] * 8])
    denominator = policy_denominator([first, second], CONFIG, 64)
    assert denominator == 10
    losses = [
        run(batch.sampler_logprobs_B_T.tolist(), batch, denominator=denominator)[0]
        for batch in (first, second)
    ]
    assert sum(losses).item() == pytest.approx(0.2)


@pytest.mark.parametrize("aggregation", ["token_mean", "constant"])
def test_a03_any_split_gives_the_same_loss_gradient_and_shares(aggregation):
    torch.manual_seed(2)
    config = PpoClip(aggregation=aggregation)
    sampler, mask = -torch.rand(6, 7), torch.rand(6, 7) > 0.4
    mask[2] = False  # one sample with nothing to train on, alone in its micro-batch below
    learner, advantages = sampler + 0.3 * torch.randn(6, 7), torch.randn(6, 7)

    def part(rows):
        return make_batch(sampler[rows].tolist(), advantages[rows].tolist(), mask[rows].tolist())

    whole = part(slice(0, 6))
    denominator = policy_denominator([whole], config, 9)
    loss, gradient, metrics = run(learner.tolist(), whole, config, denominator)
    slices = [slice(0, 2), slice(2, 3), slice(3, 6)]
    assert policy_denominator([part(s) for s in slices], config, 9) == denominator
    runs = [run(learner[s].tolist(), part(s), config, denominator) for s in slices]
    assert sum(r[0] for r in runs).item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(torch.cat([r[1] for r in runs]), gradient)
    assert summarise(merge_metrics([r[2] for r in runs])) == pytest.approx(
        summarise(merge_metrics([metrics])), rel=1e-6
    )


def test_constant_denominator_counts_samples_not_tokens():
    # Two samples, room for 10 tokens each: 20, though only 3 tokens are trained.
    batch = make_batch([[-1.0] * 2] * 2, [[-1.0] * 2] * 2, [[True, True], [True, False]])
    config = PpoClip(aggregation="constant")
    assert policy_denominator([batch], config, 10) == 20
    loss, _, _ = run([[-1.0] * 2] * 2, batch, config, 20.0)
    assert loss.item() == pytest.approx(3 / 20)
    assert policy_denominator([], config, 10) == 0


def test_a08_an_end_token_that_equals_padding_is_trained_on():
    # pad id = eos id = 0; ids [5, 6, 0, 7, 8, 0 | 0, 0], true length 6. The loss goes by masks,
    # built from length, so both genuine zeros carry gradient and the two paddings carry none.
    ids = torch.tensor([[5, 6, 0, 7, 8, 0, 0, 0]])
    valid = torch.tensor([[True] * 6 + [False] * 2])
    mask = [[False] + [True] * 5 + [False] * 2]
    batch = make_batch([[-1.0] * 8], [[1.0] * 8], mask, token_ids=ids, valid=valid)
    _, gradient, _ = run([[-1.0] * 8], batch)
    assert (gradient != 0).tolist() == mask


# --- the value head ---


def test_value_loss_by_hand():
    # ½(1 − 3)² + ½(2 − 2)² = 2, over two targets = 1; gradient (V − G)/2 = −1 and 0.
    batch = make_batch(
        [[-1.0] * 3],
        [[0.0] * 3],
        returns_B_T=torch.tensor([[3.0, math.nan, 2.0]]),
        value_mask_B_T=torch.tensor([[True, False, True]]),
    )
    values = torch.tensor([[1.0, math.inf, 2.0]], requires_grad=True)
    assert value_denominator([batch, batch]) == 4
    output = value_loss(values, batch, value_denominator([batch]))
    output.loss.backward()
    assert output.loss.item() == 1.0
    assert values.grad.tolist() == [[-1.0, 0.0, 0.0]]
    assert summarise(merge_metrics([output.metrics]))["value_mse"] == 2.0


def test_value_loss_needs_targets_and_zero_of_them_is_zero():
    batch = make_batch([[-1.0]], [[0.0]])
    with pytest.raises(MissingTargetsError, match="returns_B_T"):
        value_loss(torch.zeros(1, 1), batch, 1.0)
    empty = make_batch(
        [[-1.0]],
        [[0.0]],
        returns_B_T=torch.zeros(1, 1),
        value_mask_B_T=torch.zeros(1, 1, dtype=torch.bool),
    )
    values = torch.ones(1, 1, requires_grad=True)
    output = value_loss(values, empty, value_denominator([empty]))
    output.loss.backward()
    assert (output.loss.item(), values.grad.item()) == (0.0, 0.0)


def test_bfloat16_logprobs_are_lifted_before_the_difference():
    # bf16 holds −1.0 and −1.0078125 apart; the loss is float32 whatever comes in.
    batch = make_batch([[-1.0]], [[1.0]])
    output = policy_loss(torch.tensor([[-1.0078125]], dtype=torch.bfloat16), batch, CONFIG, 1.0)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(-math.exp(-0.0078125), rel=1e-6)
