"""Small batches for the losses, and one call of a loss."""

import math

import torch

from configs.schema.rl_losses import PpoClip
from tasks.rl.losses import (
    policy_denominator,
    policy_loss,
)
from tasks.rl.types import TrainBatch

CONFIG = PpoClip()


def make_batch(sampler, advantages, mask=None, **fields):
    """A batch from nested lists; position 0 of each row is the prompt unless `mask` says more."""
    sampler_B_T = torch.tensor(sampler, dtype=torch.float32)
    mask_B_T = (
        torch.ones_like(sampler_B_T, dtype=torch.bool)
        if mask is None
        else torch.tensor(mask, dtype=torch.bool)
    )
    return TrainBatch(
        token_ids_B_T=fields.pop("token_ids", torch.ones_like(sampler_B_T, dtype=torch.int64)),
        valid_B_T=fields.pop("valid", torch.ones_like(mask_B_T)),
        action_mask_B_T=mask_B_T,
        sampler_logprobs_B_T=sampler_B_T,
        advantages_B_T=torch.tensor(advantages, dtype=torch.float32),
        temperature_B=torch.ones(sampler_B_T.shape[0]),
        **fields,
    )


def run(learner, batch, config=CONFIG, denominator=None):
    """(loss, gradient, metrics) of the policy loss."""
    logprobs = torch.tensor(learner, dtype=torch.float32, requires_grad=True)
    if denominator is None:
        denominator = policy_denominator([batch], config, 64)
    output = policy_loss(logprobs, batch, config, denominator)
    output.loss.backward()
    return output.loss.detach(), logprobs.grad, output.metrics


def rows_at_ratio(*ratios):
    """One row of learner logprobs whose ratio to a sampler at −1 is as given."""
    return [[-1.0 + math.log(r) for r in ratios]]
