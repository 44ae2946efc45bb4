"""KL(π ‖ π_ref) per token: estimators, the loss, and the penalty in the reward.

With d = log π_ref − log π at a token drawn from π (J. Schulman, "Approximating KL Divergence",
2020): k1 = −d and k3 = e^d − d − 1 are unbiased values, k2 = d²/2 is the one whose *gradient* is
that of the KL. So k2 is the loss, k1 may come off the reward, and k3 is only reported. All
logprobs are at the sample's temperature.
"""

from collections.abc import Sequence

import torch

from configs.schema.rl_losses import Aggregation
from tasks.rl.losses import log_ratios, ratios, select, sum_over_tokens
from tasks.rl.types import LossOutput, TrainBatch

D_BOUND = 20.0
"""|d| is clamped to this in every estimator."""
K3_BOUND = 10.0
"""k3 is clamped to this once more: e^20 would drown every other token of a mean."""


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """−d: unbiased, of either sign, noisy. Nats, same shape."""
    return -_d(logprobs, ref_logprobs)


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """d²/2: biased as a value, right as a gradient. Nats, same shape."""
    return _d(logprobs, ref_logprobs).square() / 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """e^d − d − 1: unbiased, never negative, less noisy. Nats, same shape."""
    d = _d(logprobs, ref_logprobs)
    return (torch.expm1(d) - d).clamp(-K3_BOUND, K3_BOUND)


def kl_loss(
    learner_logprobs_B_T: torch.Tensor,
    ref_logprobs_B_T: torch.Tensor,
    batch: TrainBatch,
    denominator: float,
    aggregation: Aggregation = "token_mean",
) -> LossOutput:
    """Σ_t sg(π_θ/μ) k2 / denominator; its gradient is that of KL(π_θ ‖ π_ref) though μ sampled.

    The caller multiplies by the coefficient β. The reported k1 and k3 carry the same weight, so
    both estimate KL(π_θ ‖ π_ref) and not the KL under the older sampler.

    Args:
        learner_logprobs_B_T: (B, T), nats; carries the gradient.
        ref_logprobs_B_T: (B, T), nats; no gradient flows into it.
        denominator: of the whole step, the same as the policy loss's, as is `aggregation`.
    """
    mask = batch.action_mask_B_T
    learner = select(mask, learner_logprobs_B_T.float())
    ref = select(mask, ref_logprobs_B_T.detach().float())
    weight = ratios(log_ratios(learner_logprobs_B_T, batch)).detach()
    per_token = select(mask, weight * k2(learner, ref))
    loss = sum_over_tokens(per_token, mask, aggregation, denominator)
    with torch.no_grad():
        metrics = {
            "kl_k1_sum": select(mask, weight * k1(learner, ref)).sum(),
            "kl_k3_sum": select(mask, weight * k3(learner, ref)).sum(),
            "kl_tokens_sum": mask.sum(),
        }
    return LossOutput(loss, metrics)


def sequence_k1(
    logprobs_B_T: torch.Tensor, ref_logprobs_B_T: torch.Tensor, action_mask_B_T: torch.Tensor
) -> torch.Tensor:
    """Σ_t k1 over each sample's actions: float32, (B,), nats."""
    per_token = k1(
        select(action_mask_B_T, logprobs_B_T.float()),
        select(action_mask_B_T, ref_logprobs_B_T.float()),
    )
    return per_token.sum(dim=1)


def k1_in_reward(
    rewards: Sequence[float | None], sequence_k1_B: Sequence[float], coefficient: float
) -> list[float | None]:
    """R − β Σ_t k1, with k1 taken under the policy that sampled; unscored stays None."""
    return [
        None if reward is None else reward - coefficient * penalty
        for reward, penalty in zip(rewards, sequence_k1_B, strict=True)
    ]


def _d(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    return (ref_logprobs - logprobs).clamp(-D_BOUND, D_BOUND)
