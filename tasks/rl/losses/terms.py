"""Ratios and weights that the losses are made of.

π_θ is the learner now, π_p the learner at the step's start, μ the policy that sampled. All in nats,
(B, T), 0 where nothing is trained. Raw log-ratios are kept; only `exp` sees them clamped.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from configs.schema.rl_losses import DecoupledPpo, GeometricReject, Loss
from tasks.rl.types import TrainBatch

LOG_RATIO_BOUND = 20.0
"""A log-ratio is clamped to ± this before `exp`; float32 overflows at 88.7."""


class MissingVersionsError(ValueError):
    """A loss needs to know which version sampled each token and which ones the learner is at."""


class StepVersions(NamedTuple):
    """Optimiser steps taken: by π_p, when the batch's first step began, and by π_θ."""

    proximal: int
    learner: int


@dataclass(frozen=True)
class TokenTerms:
    """One batch as a surrogate sees it. Only `learner` and `log_step` carry a gradient."""

    mask: torch.Tensor
    """bool; trained on."""
    advantages: torch.Tensor
    learner: torch.Tensor
    """log π_θ."""
    log_ratio: torch.Tensor
    """log π_θ/μ, without gradient."""
    log_weight: torch.Tensor
    """log π_p/μ, without gradient: the mismatch, and what decoupled PPO weighs by."""
    log_step: torch.Tensor
    """log of the ratio that is clipped: π_θ/π_p, or π_θ/μ for a loss without π_p."""


def select(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` where `mask` is True, else exactly 0 with a gradient of exactly 0."""
    return torch.where(mask, values, torch.zeros_like(values))


def lifted(values: torch.Tensor) -> torch.Tensor:
    """At least float32, so that a difference of bfloat16 logprobs is taken of what they hold."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratios(learner_logprobs_B_T: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """Raw log(π_θ/μ) on actions and 0 elsewhere: (B, T), nats, not clamped."""
    raw = lifted(learner_logprobs_B_T) - lifted(batch.sampler_logprobs_B_T)
    return select(batch.action_mask_B_T, raw)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Within ±20, with a gradient of 0 outside; NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratios(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio clamped to ±20; NaN stays NaN."""
    return clamped(log_ratio).exp()


def beyond_bound(log_ratio: torch.Tensor) -> torch.Tensor:
    """True where the clamp changes the log-ratio."""
    return log_ratio.abs() > LOG_RATIO_BOUND


def with_gradient_of(values: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """`values`, whose derivative by `logprobs` is 1."""
    return values.detach() + (logprobs - logprobs.detach())


def token_terms(
    learner_logprobs_B_T: torch.Tensor,
    batch: TrainBatch,
    config: Loss,
    proximal_logprobs_B_T: torch.Tensor | None,
    versions: StepVersions | None,
) -> TokenTerms:
    """Log-ratios of a batch under the proximal policy that `config` asks for.

    Decoupled PPO takes the scores given, else π_θ itself without gradient, which is right in the
    first step of a batch, or interpolates. The other losses clip π_θ/μ and take one step a batch.
    """
    mask = batch.action_mask_B_T
    learner = select(mask, lifted(learner_logprobs_B_T))
    log_ratio = log_ratios(learner_logprobs_B_T, batch)
    raw = log_ratio.detach()
    if not isinstance(config, DecoupledPpo):
        log_weight, log_step = raw, log_ratio
    elif config.proximal == "interpolated":
        share = interpolation(batch, versions).to(raw.dtype)
        # Not by multiplying alone: 0 × inf is NaN.
        log_weight = torch.where(share == 0, torch.zeros_like(raw), share * raw)
        rest = torch.where(share == 1, torch.zeros_like(raw), (1 - share) * raw)
        log_step = with_gradient_of(rest, learner)
    elif proximal_logprobs_B_T is None:
        log_weight, log_step = raw, with_gradient_of(torch.zeros_like(raw), learner)
    else:
        proximal = select(mask, lifted(proximal_logprobs_B_T.detach()))
        log_weight = log_ratios(proximal, batch)
        log_step = learner - proximal
    return TokenTerms(mask, select(mask, batch.advantages_B_T), learner, raw, log_weight, log_step)


def interpolation(batch: TrainBatch, versions: StepVersions | None) -> torch.Tensor:
    """α = (v_p − v_μ) / (v_θ − v_μ) of log π_p ≈ log μ + α (log π_θ − log μ); 1 where v_θ = v_μ.

    There the learner has taken no step since it sampled, so π_p is π_θ and its ratio 1.
    """
    if batch.sampler_steps_B_T is None or versions is None:
        raise MissingVersionsError(_MISSING.format("rl.loss.proximal=interpolated"))
    since_p = versions.proximal - batch.sampler_steps_B_T
    since_now = versions.learner - batch.sampler_steps_B_T
    share = since_p.double() / since_now.clamp(min=1)
    return torch.where(since_now > 0, share, torch.ones_like(share))


def rejected_samples(
    log_weight: torch.Tensor,
    batch: TrainBatch,
    band: GeometricReject | None,
    versions: StepVersions | None,
) -> torch.Tensor:
    """bool, (B, 1): True = the sample's engines disagree, see `GeometricReject`.

    A sample without a token of the present version is not judged; a NaN is not hidden by rejecting
    its sample.
    """
    if band is None:
        return torch.zeros_like(batch.action_mask_B_T[:, :1])
    if batch.sampler_steps_B_T is None or versions is None:
        raise MissingVersionsError(_MISSING.format("rl.loss.geometric_reject"))
    present = batch.action_mask_B_T & (batch.sampler_steps_B_T == versions.proximal)
    mean = sample_mean(log_weight, present).exp()
    return ((mean < band.low) | (mean > band.high)) & present.any(dim=1, keepdim=True)


def sample_mean(values_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Mean over the chosen tokens of each sample, 0 without any: (B, 1)."""
    count = mask_B_T.sum(dim=1, keepdim=True).clamp(min=1)
    return select(mask_B_T, values_B_T).sum(dim=1, keepdim=True) / count


_MISSING = (
    "{} compares versions: expected TrainBatch.sampler_steps_B_T and `versions` of the step; pass "
    "both, or unset the key"
)
