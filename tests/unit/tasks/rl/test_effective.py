"""Effective samples: three factors, each able to bring the product down."""

import math

import pytest
import torch

from configs.schema.rl_losses import PpoClip
from tasks.rl.effective import EffectiveSamples, ShareError, ess_share
from tasks.rl.losses import merge_metrics, policy_denominator, policy_loss, summarise
from tasks.rl.types import TrainBatch


def test_product_by_hand():
    assert EffectiveSamples(100, 0.8, 0.5).value == pytest.approx(40)
    assert EffectiveSamples(0, 1.0, 1.0).value == 0
    assert EffectiveSamples(8, 1.0, 1.0 + 1e-7).value == pytest.approx(8)


@pytest.mark.parametrize(
    "factors",
    [(-1, 1.0, 1.0), (1, 1.1, 1.0), (1, 1.0, -0.1), (1, math.nan, 1.0), (1, 1.0, math.nan)],
)
def test_impossible_factors_are_refused(factors):
    with pytest.raises(ShareError):
        EffectiveSamples(*factors)


def test_ess_share_by_hand():
    # w = 2, 1: (3)²/(2·5) = .9; equal: 1; one weight alone: 1/4
    assert ess_share([math.log(2), 0.0]) == pytest.approx(0.9)
    assert ess_share([5.0] * 3) == pytest.approx(1.0)
    assert ess_share([0.0, -900.0, -900.0, -900.0]) == pytest.approx(0.25)
    assert ess_share([9000.0, 9000.0 - math.log(2)]) == pytest.approx(0.9)
    assert ess_share([]) is None


def test_a_tighter_clip_gives_fewer_effective_samples():
    torch.manual_seed(0)
    sampler = -torch.rand(32, 8)
    learner = sampler + 0.3 * torch.randn(32, 8)
    batch = TrainBatch(
        token_ids_B_T=torch.ones(32, 8, dtype=torch.int64),
        valid_B_T=torch.ones(32, 8, dtype=torch.bool),
        action_mask_B_T=torch.ones(32, 8, dtype=torch.bool),
        sampler_logprobs_B_T=sampler,
        advantages_B_T=torch.randn(32, 1).expand(32, 8) * (torch.arange(32) % 4 > 0)[:, None],
        temperature_B=torch.ones(32),
    )

    def effective(clip):
        config = PpoClip(clip_low=clip, clip_high=clip)
        denominator = policy_denominator([batch], config, 8)
        merged = merge_metrics([policy_loss(learner, batch, config, denominator).metrics])
        shares = summarise(merged)
        # A quarter of the samples has an advantage of zero.
        assert int(merged["advantage_samples_sum"]) == 24
        return EffectiveSamples(24, shares["kept_token_share"], shares["ess_share"]).value

    values = [effective(clip) for clip in (0.9, 0.4, 0.2, 0.1, 0.02)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    # ESS of clipped weights, alone, would have said the opposite.
    log_weights = (learner - sampler).sum(1)
    loose, tight = (
        ess_share((learner - sampler).clamp(-b, b).sum(1).tolist()) for b in (0.9, 0.02)
    )
    assert tight > loose
    assert tight > ess_share(log_weights.tolist())
