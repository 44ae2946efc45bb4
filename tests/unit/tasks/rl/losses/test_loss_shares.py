"""What a loss tells of its weights: effective sample size and shares, by hand."""

import math

import pytest
import torch
from loss_batches import CONFIG, make_batch, rows_at_ratio, run

from configs.schema.rl_losses import PpoClip
from tasks.rl.losses import (
    MetricNameError,
    merge_metrics,
    policy_loss,
    sequence_weight_metrics,
    summarise,
)


def test_ess_of_raw_sequence_weights_by_hand():
    # Sequence weights 2·1 and 1·1; the third row trains nothing and does not count.
    # (2 + 1)² / (2 · (4 + 1)) = 9/10
    learner = rows_at_ratio(2.0, 1.0) + [[-1.0, -1.0]] * 2
    mask = [[True, True], [True, True], [False, False]]
    batch = make_batch([[-1.0] * 2] * 3, [[1.0] * 2] * 3, mask)
    _, _, metrics = run(learner, batch)
    shares = summarise(merge_metrics([metrics]))
    assert shares["ess_share"] == pytest.approx(0.9, rel=1e-6)
    assert shares["ratio_mean"] == pytest.approx(5 / 4, rel=1e-6)
    assert shares["weight_max"] == pytest.approx(2.0, rel=1e-6)
    # Four tokens have A > 0; the one at ratio 2 is above 1.28.
    assert shares["clip_fraction"] == pytest.approx(1 / 4)
    assert shares["kept_token_share"] == pytest.approx(3 / 4)
    assert metrics["advantage_samples_sum"] == 2


def test_ess_does_not_overflow_and_one_weight_can_outweigh_the_rest():
    # Log-weights 3000 and 0: the first is everything, 1/2.
    batch = make_batch([[-1001.0] * 3, [-1.0] * 3], [[1.0] * 3] * 2)
    _, _, metrics = run([[-1.0] * 3] * 2, batch)
    assert summarise(merge_metrics([metrics]))["ess_share"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("log_weights", "share"),
    [
        ([math.inf, 0.0], 1 / 2),  # one is everything
        ([math.inf, math.inf, 0.0, -5.0], 2 / 4),
        ([-math.inf, 0.0], 1 / 2),  # 0 and 1
        ([-math.inf, -math.inf], 1.0),  # alike
        ([math.nan, 0.0], math.nan),  # for the guard to see
    ],
)
def test_ess_of_infinite_weights_is_their_limit(log_weights, share):
    rows = torch.tensor(log_weights)[:, None]
    metrics = sequence_weight_metrics(rows, torch.ones_like(rows, dtype=torch.bool))
    found = summarise(merge_metrics([metrics]))["ess_share"]
    assert found == pytest.approx(share, rel=1e-6, nan_ok=True)


def test_ess_does_not_depend_on_the_clip_and_the_kept_share_does():
    torch.manual_seed(3)
    sampler = -torch.rand(16, 8)
    learner = (sampler + 0.3 * torch.randn(16, 8)).tolist()
    batch = make_batch(sampler.tolist(), torch.randn(16, 8).tolist())
    shares = [
        summarise(merge_metrics([run(learner, batch, PpoClip(clip_low=c, clip_high=c))[2]]))
        for c in (0.5, 0.2, 0.1, 0.02)
    ]
    assert len({s["ess_share"] for s in shares}) == 1
    kept = [s["kept_token_share"] for s in shares]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


def test_on_policy_everything_is_one():
    batch = make_batch([[-0.5, -2.0]] * 4, [[1.0, -1.0]] * 4)
    _, gradient, metrics = run([[-0.5, -2.0]] * 4, batch)
    shares = summarise(merge_metrics([metrics]))
    assert shares["ess_share"] == pytest.approx(1.0)
    assert (shares["kept_token_share"], shares["clip_fraction"]) == (1.0, 0.0)
    assert (shares["ratio_mean"], shares["weight_max"]) == (1.0, 1.0)
    # On-policy the gradient is the plain policy gradient −A / tokens.
    assert gradient.tolist() == [[-1 / 8, 1 / 8]] * 4


def test_metrics_carry_no_gradient():
    batch = make_batch([[-1.0]], [[1.0]])
    output = policy_loss(torch.tensor([[-1.0]], requires_grad=True), batch, CONFIG, 1.0)
    assert not any(value.requires_grad for value in output.metrics.values())


def test_merge_refuses_a_name_that_does_not_say_how():
    with pytest.raises(MetricNameError, match="ratio_mean"):
        merge_metrics([{"ratio_mean": torch.tensor(1.0)}])
    assert merge_metrics([]) == {}
