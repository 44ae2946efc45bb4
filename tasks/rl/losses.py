"""Policy and value losses as pure functions on tensors; no logging, no `.item()`.

A loss is a sum over trained tokens divided by a denominator that is passed in, so micro-batches and
ranks add up to the one-shot loss. Untrained positions are *selected* away before any arithmetic
(`0 × inf` is NaN, in the gradient too); a NaN on a trained position stays NaN for the step's
non-finite guard to see. Metric names end in how they combine over micro-batches: `_sum`, `_max`,
`_logsumexp`; `merge_metrics` and `summarise` do it.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from configs.schema.rl_losses import PpoClip
from tasks.rl.types import LossOutput, TrainBatch

LOG_RATIO_BOUND = 20.0
"""|log π_θ/μ| is clamped to this before `exp`; float32 overflows at 88.7."""


class DenominatorError(ValueError):
    """A loss has trained tokens but nothing to divide by."""


class MissingTargetsError(ValueError):
    """A value loss was asked of a batch without value targets."""


class MetricNameError(ValueError):
    """A metric's name does not say how it combines over micro-batches."""


def select(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` where `mask` is True, else exactly 0 with a gradient of exactly 0."""
    return torch.where(mask, values, torch.zeros_like(values))


def sum_over(total: torch.Tensor, mask: torch.Tensor, denominator: float) -> torch.Tensor:
    """`total / denominator`; 0 with zero gradients where nothing at all is trained.

    Raises:
        DenominatorError: not a positive number, although the mask selects something.
    """
    if 0 < denominator < math.inf:
        return total / denominator
    if bool(mask.any()):
        raise DenominatorError(
            f"denominator={denominator} for a batch with trained tokens; expected the positive "
            "global count from `policy_denominator` or `value_denominator`"
        )
    return total * 0.0


def policy_denominator(
    batches: Sequence[TrainBatch], config: PpoClip, max_new_tokens: int
) -> float:
    """What the policy loss of one optimiser step is divided by, over all its micro-batches.

    `token_mean`: trained tokens (arXiv 2503.14476). `constant`: samples × `max_new_tokens`, the
    longest answer an episode may give, so that long wrong answers are not diluted
    (arXiv 2503.20783). 0.0 where nothing is trained. With several ranks, add their values up first.
    """
    if config.aggregation == "constant":
        return float(sum(b.action_mask_B_T.shape[0] for b in batches) * max_new_tokens)
    return float(sum(int(b.action_mask_B_T.sum()) for b in batches))


def value_denominator(batches: Sequence[TrainBatch]) -> float:
    """Positions with a value target, over all micro-batches of one optimiser step."""
    return float(sum(int(_value_targets(b)[1].sum()) for b in batches))


def log_ratios(learner_logprobs_B_T: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """Raw log(π_θ/μ) on actions and 0 elsewhere: float32, (B, T), nats, not clamped."""
    raw = learner_logprobs_B_T.float() - batch.sampler_logprobs_B_T.float()
    return select(batch.action_mask_B_T, raw)


def ratios(log_ratios_B_T: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio clamped to ±20; NaN stays NaN."""
    return log_ratios_B_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ppo_clip_loss(
    learner_logprobs_B_T: torch.Tensor, batch: TrainBatch, config: PpoClip, denominator: float
) -> LossOutput:
    """PPO's clipped surrogate on r = π_θ/μ (arXiv 1707.06347), for one optimiser step a batch.

    Objective per token min(r A, clip(r, 1 − ε_l, 1 + ε_h) A), clip-higher as in arXiv 2503.14476;
    dual clip (arXiv 1912.09729) bounds it below by c A where A < 0.

    Args:
        learner_logprobs_B_T: (B, T), nats, at the sample's temperature; carries the gradient.
        denominator: of the whole step, from `policy_denominator`.

    Returns:
        The loss, and sums over this batch; `summarise` names the shares they become.
    """
    mask, advantages = batch.action_mask_B_T, select(batch.action_mask_B_T, batch.advantages_B_T)
    log_ratio = log_ratios(learner_logprobs_B_T, batch)
    ratio = ratios(log_ratio)
    clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    loss = sum_over(-select(mask, objective).sum(), mask, denominator)
    with torch.no_grad():
        clipped = _clipped(ratio, advantages, config)
        metrics = {
            **_ratio_metrics(log_ratio, ratio, mask),
            **_kept_metrics(log_ratio, advantages, clipped, mask),
            **sequence_weight_metrics(log_ratio, mask),
        }
    return LossOutput(loss, metrics)


def value_loss(values_B_T: torch.Tensor, batch: TrainBatch, denominator: float) -> LossOutput:
    """½ (V − G)² at the last observation token before each turn.

    Args:
        values_B_T: (B, T); carries the gradient.
        denominator: of the whole step, from `value_denominator`.
    """
    returns, mask = _value_targets(batch)
    error = select(mask, values_B_T.float() - returns)
    loss = sum_over(0.5 * error.square().sum(), mask, denominator)
    with torch.no_grad():
        target = select(mask, returns)
        metrics = {
            "value_error_sq_sum": error.square().sum(),
            "value_return_sum": target.sum(),
            "value_return_sq_sum": target.square().sum(),
            "value_targets_sum": mask.sum(),
        }
    return LossOutput(loss, metrics)


def sequence_weight_metrics(
    log_ratios_B_T: torch.Tensor, action_mask_B_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Sums for the ESS of raw, unclipped sequence weights w = exp Σ_t log(π_θ/μ).

    Kept as log Σ w and log Σ w² in float64, since w itself overflows; samples without a trained
    token do not count.
    """
    trained = action_mask_B_T.any(dim=1)
    log_weights = select(action_mask_B_T, log_ratios_B_T).double().sum(dim=1)[trained]
    return {
        "sequence_weight_logsumexp": torch.logsumexp(log_weights, dim=0),
        "sequence_weight_sq_logsumexp": torch.logsumexp(2 * log_weights, dim=0),
        "sequences_sum": trained.sum(),
    }


def merge_metrics(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Combine the metrics of micro-batches, each by the ending of its name.

    Raises:
        MetricNameError: a name that ends in neither `_sum`, `_max` nor `_logsumexp`.
    """
    merged: dict[str, torch.Tensor] = {}
    for name in sorted({name for part in parts for name in part}):
        stacked = torch.stack([part[name].double() for part in parts if name in part])
        if name.endswith("_logsumexp"):
            merged[name] = torch.logsumexp(stacked, dim=0)
        elif name.endswith("_sum"):
            merged[name] = stacked.sum()
        elif name.endswith("_max"):
            merged[name] = stacked.max()
        else:
            raise MetricNameError(f"metric {name!r}: expected an ending _sum, _max or _logsumexp")
    return merged


def summarise(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Means and shares of one optimiser step from its merged sums; what has no samples is left out.

    `ess_share` = (Σw)² / (n Σw²) of raw sequence weights; `kept_token_share` = trained tokens with
    a non-zero advantage that neither clip nor clamp silences; `clip_fraction` of the same tokens.
    """
    shares = {name: float(value) for name, value in metrics.items() if name.endswith("_max")}
    for name, (part, whole) in _SHARES.items():
        if part in metrics and float(metrics[whole]):
            shares[name] = float(metrics[part]) / float(metrics[whole])
    if float(metrics.get("sequences_sum", torch.tensor(0.0))):
        log_ess = 2 * metrics["sequence_weight_logsumexp"] - metrics["sequence_weight_sq_logsumexp"]
        shares["ess_share"] = float(log_ess.double().exp() / metrics["sequences_sum"])
    return shares


_SHARES = {
    "ratio_mean": ("ratio_sum", "action_tokens_sum"),
    "clamped_token_share": ("clamped_tokens_sum", "action_tokens_sum"),
    "clip_fraction": ("clipped_tokens_sum", "advantage_tokens_sum"),
    "kept_token_share": ("kept_tokens_sum", "advantage_tokens_sum"),
    "value_mse": ("value_error_sq_sum", "value_targets_sum"),
    "kl_k1_mean": ("kl_k1_sum", "kl_tokens_sum"),
    "kl_k3_mean": ("kl_k3_sum", "kl_tokens_sum"),
}


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: PpoClip) -> torch.Tensor:
    """True = the clip, not the ratio, decides the token's objective, so its gradient is 0."""
    clipped = (advantages > 0) & (ratio > 1 + config.clip_high)
    clipped |= (advantages < 0) & (ratio < 1 - config.clip_low)
    if config.dual_clip is not None:
        clipped |= (advantages < 0) & (ratio > config.dual_clip)
    return clipped


def _ratio_metrics(
    log_ratio: torch.Tensor, ratio: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Size of the mismatch: raw log-ratios beside the count of tokens the clamp changed."""
    return {
        "action_tokens_sum": mask.sum(),
        "ratio_sum": select(mask, ratio).sum(),
        "weight_max": _max_or_zero(select(mask, ratio)),
        "log_ratio_abs_max": _max_or_zero(log_ratio.abs()),
        "clamped_tokens_sum": (log_ratio.abs() > LOG_RATIO_BOUND).sum(),
    }


def _kept_metrics(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clipped: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How many of the tokens with something to teach still push the policy."""
    active = mask & (advantages != 0)
    silenced = clipped | (log_ratio.abs() > LOG_RATIO_BOUND)
    return {
        "advantage_tokens_sum": active.sum(),
        "clipped_tokens_sum": (active & clipped).sum(),
        "kept_tokens_sum": (active & ~silenced).sum(),
        "advantage_samples_sum": active.any(dim=1).sum(),
    }


def _max_or_zero(values: torch.Tensor) -> torch.Tensor:
    return values.max() if values.numel() else values.sum()


def _value_targets(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    if batch.returns_B_T is None or batch.value_mask_B_T is None:
        raise MissingTargetsError(
            "the value loss needs TrainBatch.returns_B_T and value_mask_B_T; fill both, or choose "
            "a credit without a value head"
        )
    return batch.returns_B_T, batch.value_mask_B_T
