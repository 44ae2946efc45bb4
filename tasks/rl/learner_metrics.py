"""What a learner reports of a batch, put together from its optimiser steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tasks.models.ranks import gather
from tasks.models.train_engine import StepStats
from tasks.rl.batch import Sample
from tasks.rl.effective import EffectiveSamples
from tasks.rl.losses import merge_metrics, summarise


@dataclass(frozen=True)
class StepReport:
    """What one batch did."""

    learner_version: int
    """Optimiser steps taken after it; the same as before where every step was skipped."""
    skipped: bool
    """True = no weight moved."""
    effective_samples: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Update:
    """One optimiser step of a batch: its samples, its sums over all ranks, and what it did."""

    samples: Sequence[Sample]
    sums: Mapping[str, torch.Tensor]
    stats: StepStats

    @property
    def effective(self) -> float:
        """Effective samples; none where it was skipped or nothing had an advantage."""
        learning = sum(any(s.advantages) for s in self.samples)
        if self.stats.skipped or not learning:
            return 0.0
        shares = summarise(self.sums)
        return EffectiveSamples(learning, shares["kept_token_share"], shares["ess_share"]).value


def over_ranks(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sums of one step, merged over this rank's micro-batches and then over ranks."""
    own = merge_metrics(parts)
    names = sorted(own)
    everyone = gather(torch.stack([own[name] for name in names]))
    return merge_metrics([dict(zip(names, row, strict=True)) for row in everyone])


def trains(sums: Mapping[str, torch.Tensor]) -> bool:
    """Whether a step has a token or a value to learn from; without, its gradient is exactly 0."""
    return any(
        bool(sums[name]) for name in ("action_tokens_sum", "value_targets_sum") if name in sums
    )


def rate_scale(sums: Mapping[str, torch.Tensor], *, by_ess: bool) -> float:
    """What a step's learning rate is multiplied by.

    0 where there is nothing to train on: momentum alone must not move the weights. Else, if asked,
    the root of the ESS share of the raw sequence weights (arXiv 2602.17616 for Adam); 1 where it is
    not known, as in a step with NaN.
    """
    if not trains(sums):
        return 0.0
    share = summarise(sums).get("ess_share", 1.0) if by_ess else 1.0
    return math.sqrt(share) if math.isfinite(share) else 1.0


def batch_metrics(updates: Sequence[Update], samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of a batch; `samples` are all of it, those no step trained on included."""
    sums = merge_metrics([update.sums for update in updates])
    metrics = summarise(sums)
    metrics["entropy_mean"] = float(sums["entropy_sum"]) / max(
        1.0, float(sums["entropy_tokens_sum"])
    )
    norms = [update.stats.grad_norm for update in updates]
    metrics["grad_norm"] = max(norms) if all(map(math.isfinite, norms)) else math.nan
    metrics["lr"] = updates[-1].stats.lr
    metrics["updates"] = float(len(updates))
    metrics["empty_updates"] = float(sum(not trains(update.sums) for update in updates))
    return metrics | _sample_metrics(samples)


def _sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    rollouts = [s.scored.rollout for s in samples]
    outcomes = [s.scored.outcome for s in samples if s.scored.outcome is not None]
    rewards = [s.scored.reward for s in samples if s.scored.reward is not None]
    count = len(samples)
    return {
        "reward_mean": sum(rewards) / len(rewards) if rewards else math.nan,
        "accuracy": sum(outcomes) / len(outcomes) if outcomes else math.nan,
        "unscored_share": 1 - len(outcomes) / count,
        "tool_call_share": sum(r.tool_calls > 0 for r in rollouts) / count,
        "truncated_share": sum(r.truncated for r in rollouts) / count,
        "trained_tokens_mean": sum(r.sampled_tokens for r in rollouts) / count,
        "turns_mean": sum(len(r.turns) for r in rollouts) / count,
    }
