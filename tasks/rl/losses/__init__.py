"""Policy and value losses as pure functions on tensors; no logging, no `.item()`.

A loss is a sum over trained tokens divided by a denominator that is passed in, so micro-batches and
ranks add up to the one-shot loss. Untrained positions are *selected* away before any arithmetic
(`0 × inf` is NaN, in the gradient too); a NaN on a trained position stays NaN for the step's
non-finite guard to see.
"""

import math
from collections.abc import Sequence

import torch

from configs.schema.rl_losses import Aggregation, DecoupledPpo, Loss
from tasks.rl.losses.bounds import scaled
from tasks.rl.losses.metrics import (
    MetricNameError,
    merge_metrics,
    policy_metrics,
    sequence_weight_metrics,
    summarise,
)
from tasks.rl.losses.surrogates import surrogate_of
from tasks.rl.losses.terms import (
    LOG_RATIO_BOUND,
    MissingVersionsError,
    StepVersions,
    lifted,
    log_ratios,
    ratios,
    rejected_samples,
    select,
    token_terms,
)
from tasks.rl.types import LossOutput, TrainBatch

__all__ = [
    "LOG_RATIO_BOUND",
    "DenominatorError",
    "MetricNameError",
    "MissingTargetsError",
    "MissingVersionsError",
    "StepVersions",
    "log_ratios",
    "merge_metrics",
    "needs_proximal",
    "policy_denominator",
    "policy_loss",
    "ratios",
    "scaled",
    "select",
    "sequence_weight_metrics",
    "sum_over_tokens",
    "summarise",
    "value_denominator",
    "value_loss",
]


class DenominatorError(ValueError):
    """A loss has trained tokens but nothing to divide by."""


class MissingTargetsError(ValueError):
    """A value loss was asked of a batch without value targets."""


def needs_proximal(config: Loss) -> bool:
    """Whether the batch must be scored before its second step; in the first, π_θ is π_p."""
    return isinstance(config, DecoupledPpo) and config.proximal == "exact"


def policy_loss(
    learner_logprobs_B_T: torch.Tensor,
    batch: TrainBatch,
    config: Loss,
    denominator: float,
    proximal_logprobs_B_T: torch.Tensor | None = None,
    *,
    versions: StepVersions | None = None,
) -> LossOutput:
    """The loss that `config` names, for one micro-batch of one optimiser step.

    Args:
        learner_logprobs_B_T: (B, T), nats, at the sample's temperature; carries the gradient.
        config: as `controllers.loss_at` gives it for the step.
        denominator: of the whole step, from `policy_denominator`.
        proximal_logprobs_B_T: (B, T), nats: the learner's scores at the batch's first step, where
            `needs_proximal`; None in that first step.
        versions: needed by an interpolated proximal policy and by geometric rejection.

    Returns:
        The loss, and sums over this batch; `summarise` names the shares they become.

    Raises:
        DenominatorError: not a positive number, although something is trained.
        MissingVersionsError: the loss compares versions and the batch or the call has none.
    """
    terms = token_terms(learner_logprobs_B_T, batch, config, proximal_logprobs_B_T, versions)
    rejected_B_1 = rejected_samples(terms.log_weight, batch, config.geometric_reject, versions)
    surrogate = surrogate_of(terms, config)
    objective = select(terms.mask & ~rejected_B_1, surrogate.objective)
    loss = sum_over_tokens(-objective, terms.mask, config.aggregation, denominator)
    return LossOutput(loss, policy_metrics(terms, surrogate, rejected_B_1))


def policy_denominator(batches: Sequence[TrainBatch], config: Loss, max_new_tokens: int) -> float:
    """What the policy loss of one optimiser step is divided by, over all its micro-batches.

    `token_mean`: trained tokens, rejected ones included (arXiv 2503.14476). `sequence_mean`:
    samples with a trained token. `constant`: samples × `max_new_tokens`, the longest answer an
    episode may give, so that long wrong answers are not diluted (arXiv 2503.20783). 0.0 where
    nothing is trained. With several ranks, add their values up first.
    """
    if config.aggregation == "constant":
        return float(sum(b.action_mask_B_T.shape[0] for b in batches) * max_new_tokens)
    if config.aggregation == "sequence_mean":
        return float(sum(int(b.action_mask_B_T.any(dim=1).sum()) for b in batches))
    return float(sum(int(b.action_mask_B_T.sum()) for b in batches))


def sum_over_tokens(
    values_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    aggregation: Aggregation,
    denominator: float,
) -> torch.Tensor:
    """Σ values / denominator; a token counts 1, or 1/n of its sample's n for `sequence_mean`.

    0 with zero gradients where nothing at all is trained.

    Raises:
        DenominatorError: not a positive number, although the mask selects something.
    """
    if aggregation == "sequence_mean":
        values_B_T = values_B_T / mask_B_T.sum(dim=1, keepdim=True).clamp(min=1)
    if 0 < denominator < math.inf:
        return values_B_T.sum() / denominator
    if bool(mask_B_T.any()):
        raise DenominatorError(
            f"denominator={denominator} for a batch with trained tokens; expected the positive "
            "global count from `policy_denominator` or `value_denominator`"
        )
    return values_B_T.sum() * 0.0


def value_denominator(batches: Sequence[TrainBatch]) -> float:
    """Positions with a value target, over all micro-batches of one optimiser step."""
    return float(sum(int(_value_targets(b)[1].sum()) for b in batches))


def value_loss(values_B_T: torch.Tensor, batch: TrainBatch, denominator: float) -> LossOutput:
    """½ (V − G)² at the last observation token before each turn.

    Args:
        values_B_T: (B, T); carries the gradient.
        denominator: of the whole step, from `value_denominator`.
    """
    returns, mask = _value_targets(batch)
    error = select(mask, lifted(values_B_T) - returns)
    loss = sum_over_tokens(0.5 * error.square(), mask, "token_mean", denominator)
    with torch.no_grad():
        target = select(mask, returns)
        metrics = {
            "value_error_sq_sum": error.square().sum(),
            "value_return_sum": target.sum(),
            "value_return_sq_sum": target.square().sum(),
            "value_targets_sum": mask.sum(),
        }
    return LossOutput(loss, metrics)


def _value_targets(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    if batch.returns_B_T is None or batch.value_mask_B_T is None:
        raise MissingTargetsError(
            "the value loss needs TrainBatch.returns_B_T and value_mask_B_T; fill both, or choose "
            "a credit without a value head"
        )
    return batch.returns_B_T, batch.value_mask_B_T
