"""Surrogates: what each loss climbs, token by token.

Each takes the terms of a batch and its own bounds and gives a `Surrogate`. A token's `kept` is the
share of its raw importance weight that still pushes the policy: 1 untouched, 0 where a clip, band
or clamp silences it, between where a weight is cut off. So tightening any bound lowers it.
"""

from typing import NamedTuple

import torch

from configs.schema.rl_losses import (
    BandedWeights,
    Cispo,
    Correction,
    DecoupledPpo,
    Gspo,
    IcePop,
    Loss,
    PpoBounds,
    Tis,
    TruncatedWeights,
)
from tasks.rl.losses.terms import (
    TokenTerms,
    beyond_bound,
    clamped,
    ratios,
    sample_mean,
    select,
    with_gradient_of,
)


class Surrogate(NamedTuple):
    """An objective per token, (B, T), and what its bounds did."""

    objective: torch.Tensor
    bounded: torch.Tensor
    """bool; a clip, cap or band changed what this token pushes."""
    kept: torch.Tensor
    """Share of the raw weight that pushes, 0 to 1."""


class Weights(NamedTuple):
    """Importance weights after a bound, (B, T), without gradient."""

    values: torch.Tensor
    bounded: torch.Tensor
    kept: torch.Tensor


def surrogate_of(terms: TokenTerms, config: Loss) -> Surrogate:
    """The surrogate that `config` names."""
    match config:
        case DecoupledPpo():
            return decoupled_ppo(terms, config)
        case PpoBounds():
            return clipped(terms.log_step, terms.advantages, config)
        case Gspo():
            return gspo(terms, config)
        case Cispo():
            return weighted_likelihood(terms, clipped_weights(terms.log_ratio, config))
        case Tis() | IcePop():
            return weighted_likelihood(terms, corrected(terms.log_ratio, terms.mask, config))


def clipped(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: PpoBounds | Gspo
) -> Surrogate:
    """min(r A, clip(r, 1 − ε_l, 1 + ε_h) A), bounded below by c A where A < 0.

    The clip of arXiv 1707.06347, its two widths as in 2503.14476, the dual clip of 1912.09729.
    """
    ratio, low, high = ratios(log_ratio), 1 - config.clip_low, 1 + config.clip_high
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    silenced = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    dual_clip = config.dual_clip if isinstance(config, PpoBounds) else None
    if dual_clip is not None:
        floored = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, floored, objective)
        silenced |= (advantages < 0) & (ratio > dual_clip)
    kept = ~silenced & ~beyond_bound(log_ratio)
    return Surrogate(objective, silenced, kept.to(objective.dtype))


def decoupled_ppo(terms: TokenTerms, config: DecoupledPpo) -> Surrogate:
    """sg(w(π_p/μ)) × the clipped surrogate of π_θ/π_p (arXiv 2505.24298)."""
    step = clipped(terms.log_step, terms.advantages, config)
    weights = corrected(terms.log_weight, terms.mask, config.correction)
    return Surrogate(
        weights.values * step.objective, step.bounded | weights.bounded, step.kept * weights.kept
    )


def gspo(terms: TokenTerms, config: Gspo) -> Surrogate:
    """The clipped surrogate of s = exp(mean over a sample of log π_θ/μ) (arXiv 2507.18071).

    Token by token as in the paper's section 4.3: each token has the value s and the gradient
    s ∇ log π_θ of its own logprob, so that advantages may differ within a sample. Where they do
    not, it is the sequence objective itself.
    """
    log_s = sample_mean(terms.log_ratio, terms.mask).expand_as(terms.learner)
    return clipped(with_gradient_of(log_s, terms.learner), terms.advantages, config)


def weighted_likelihood(terms: TokenTerms, weights: Weights) -> Surrogate:
    """sg(w) A log π_θ: the policy gradient under weights; a bound never stops a token's gradient
    unless its weight is 0."""
    objective = weights.values * terms.advantages * terms.learner
    return Surrogate(objective, weights.bounded, weights.kept)


def clipped_weights(log_ratio: torch.Tensor, config: Cispo) -> Weights:
    """clip(π_θ/μ, 1 − ε_l, 1 + ε_h) (CISPO, arXiv 2506.13585)."""
    raw = ratios(log_ratio)
    values = raw.clamp(1 - config.clip_low, 1 + config.clip_high)
    return Weights(values, values != raw, _share_used(values, log_ratio))


def corrected(
    log_ratio: torch.Tensor, mask: torch.Tensor, config: Correction | Tis | IcePop
) -> Weights:
    """Importance weights with a cap, per token or per sample, or inside a band."""
    if isinstance(config, TruncatedWeights) and config.level == "sequence":
        log_ratio = select(mask, log_ratio).sum(dim=1, keepdim=True).expand_as(log_ratio)
    raw = ratios(log_ratio)
    if isinstance(config, BandedWeights):
        # Written by what falls outside, so that NaN is inside and stays visible.
        outside = (raw < config.low) | (raw > config.high)
        values = select(~outside, raw)
        return Weights(values, outside, select(~outside, _share_used(raw, log_ratio)))
    values = raw.clamp(max=config.cap)
    return Weights(values, raw > config.cap, _share_used(values, log_ratio))


def _share_used(values: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """min(w/raw, raw/w), in logs since a raw weight may overflow; exactly 1 where they agree."""
    used = torch.where(values == clamped(log_ratio).exp(), clamped(log_ratio), values.log())
    return (-(used - log_ratio).abs()).exp()
