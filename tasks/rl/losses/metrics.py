"""What a policy loss reports: sums over tokens, how they merge, and the shares they become.

A metric's name ends in how it combines over micro-batches and ranks: `_sum`, `_max`, `_logsumexp`.
"""

from collections.abc import Mapping, Sequence

import torch

from tasks.rl.losses.surrogates import Surrogate
from tasks.rl.losses.terms import TokenTerms, beyond_bound, ratios, select


class MetricNameError(ValueError):
    """A metric's name does not say how it combines over micro-batches."""


def policy_metrics(
    terms: TokenTerms, surrogate: Surrogate, rejected_B_1: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The sums of one micro-batch, without gradient."""
    with torch.no_grad():
        return {
            **_mismatch(terms),
            **_kept(terms, surrogate, rejected_B_1),
            **sequence_weight_metrics(terms.log_ratio, terms.mask),
        }


def sequence_weight_metrics(
    log_ratios_B_T: torch.Tensor, action_mask_B_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Sums for the ESS of raw, unclipped sequence weights w = exp Σ_t log(π_θ/μ).

    Kept as log Σ w and log Σ w² in float64, since w itself overflows; samples without a trained
    token do not count. An infinite weight outweighs every finite one and equals another infinite
    one, as do weights of 0 where there is nothing else; NaN stays NaN.
    """
    trained = action_mask_B_T.any(dim=1)
    log_weights = select(action_mask_B_T, log_ratios_B_T).double().sum(dim=1)[trained]
    log_weights = log_weights.clamp(-_LOG_WEIGHT_BOUND, _LOG_WEIGHT_BOUND)
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

    `ess_share` = (Σw)² / (n Σw²) of raw sequence weights; `kept_token_share` = what bounds and
    rejection leave of the trained tokens with a non-zero advantage; `clip_fraction` = those among
    them that a bound changed.
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
    "log_ratio_abs_mean": ("log_ratio_abs_sum", "action_tokens_sum"),
    "clamped_token_share": ("clamped_tokens_sum", "action_tokens_sum"),
    "clip_fraction": ("clipped_tokens_sum", "advantage_tokens_sum"),
    "kept_token_share": ("kept_tokens_sum", "advantage_tokens_sum"),
    "rejected_sample_share": ("rejected_samples_sum", "sequences_sum"),
    "value_mse": ("value_error_sq_sum", "value_targets_sum"),
    "kl_k1_mean": ("kl_k1_sum", "kl_tokens_sum"),
    "kl_k3_mean": ("kl_k3_sum", "kl_tokens_sum"),
}


_LOG_WEIGHT_BOUND = 1e9
"""Infinite log-weights become this: ∞ − ∞ is NaN, and float64 still has digits to spare here."""


def _mismatch(terms: TokenTerms) -> dict[str, torch.Tensor]:
    """How far π_θ is from μ: raw log-ratios beside the count of tokens the clamp changed."""
    size = terms.log_ratio.abs()
    ratio = select(terms.mask, ratios(terms.log_ratio))
    return {
        "action_tokens_sum": terms.mask.sum(),
        "ratio_sum": ratio.sum(),
        "weight_max": _max_or_zero(ratio),
        "log_ratio_abs_sum": size.sum(),
        "log_ratio_abs_max": _max_or_zero(size),
        "clamped_tokens_sum": beyond_bound(size).sum(),
    }


def _kept(
    terms: TokenTerms, surrogate: Surrogate, rejected_B_1: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How much of what has something to teach still pushes the policy."""
    active = terms.mask & (terms.advantages != 0)
    return {
        "advantage_tokens_sum": active.sum(),
        "clipped_tokens_sum": (active & surrogate.bounded).sum(),
        "kept_tokens_sum": select(active & ~rejected_B_1, surrogate.kept).sum(),
        "rejected_samples_sum": rejected_B_1.sum(),
        "advantage_samples_sum": active.any(dim=1).sum(),
    }


def _max_or_zero(values: torch.Tensor) -> torch.Tensor:
    return values.max() if values.numel() else values.sum()
