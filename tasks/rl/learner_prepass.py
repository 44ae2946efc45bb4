"""What credit needs before the step: values, and rewards with KL taken off. Often there is none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from tasks.models.ranks import add_up
from tasks.rl.batch import Sample, without_credit
from tasks.rl.errors import RlError
from tasks.rl.kl import k1_in_reward, sequence_k1
from tasks.rl.types import Group, TrainBatch


class NonFiniteKlError(RlError, ArithmeticError):
    """KL that is to come off a reward is NaN."""


class Scorer(Protocol):
    """Whoever scores a batch without a gradient; every rank its own share of it."""

    @property
    def with_values(self) -> bool:
        """Whether a value head is trained."""
        ...

    @property
    def kl_in_reward(self) -> bool:
        """Whether KL comes off the reward."""
        ...

    def share(self, samples: Sequence[Sample]) -> list[tuple[list[int], TrainBatch]]:
        """This rank's micro-batches, and which samples each holds."""
        ...

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """(B, T), nats."""
        ...

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """(B, T): the value head everywhere."""
        ...


@dataclass(frozen=True)
class Prepass:
    """Groups as credit is to see them."""

    groups: list[Group]
    """With KL off their rewards, where it is placed there."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """rollout_id → V before each turn."""


def prepass(scorer: Scorer, groups: Sequence[Group], kl_coefficient: float) -> Prepass:
    """Score the batch's samples, as far as credit asks for it.

    Raises:
        NonFiniteKlError: a sample's KL to the snapshot is no number.
    """
    if not (scorer.with_values or scorer.kl_in_reward):
        return Prepass(list(groups))
    samples = without_credit(groups, with_values=scorer.with_values)
    rollouts = [s.scored.rollout for s in samples]
    penalties = torch.zeros(len(samples), dtype=torch.float64)
    values = [torch.zeros(len(r.turns), dtype=torch.float64) for r in rollouts]
    for rows, batch in scorer.share(samples):
        if scorer.kl_in_reward:
            reference = scorer.reference_logprobs(batch)
            k1 = sequence_k1(batch.sampler_logprobs_B_T, reference, batch.action_mask_B_T)
            penalties[rows] = k1[: len(rows)].double().cpu()
        if scorer.with_values:
            scores = scorer.values(batch).double().cpu()
            for row, index in enumerate(rows):
                before = [turn.start - 1 for turn in rollouts[index].turns]
                values[index] = scores[row, before]
    counts = [len(v) for v in values]
    known = add_up(torch.cat([penalties, *values]))
    penalties, *values = known.split([len(samples), *counts])
    off = dict(zip((r.rollout_id for r in rollouts), penalties.tolist(), strict=True))
    return Prepass(
        [_penalise(g, off, kl_coefficient) for g in groups]
        if scorer.kl_in_reward
        else list(groups),
        {r.rollout_id: v.tolist() for r, v in zip(rollouts, values, strict=True)}
        if scorer.with_values
        else {},
    )


def _penalise(group: Group, penalties: dict[str, float], coefficient: float) -> Group:
    ids = [r.rollout.rollout_id for r in group.rollouts]
    for name in ids:
        if not math.isfinite(penalties[name]):
            raise NonFiniteKlError(
                f"sample {name} of row {group.row_id}: its KL to the SFT snapshot is "
                f"{penalties[name]} and cannot come off its reward; its sampler's log-probabilities"
                " or the snapshot's are not finite: resume from an earlier checkpoint, or run with "
                "rl.kl.placement=loss, where such a step is skipped and counted"
            )
    rewards = k1_in_reward(
        [r.reward for r in group.rollouts], [penalties[i] for i in ids], coefficient
    )
    rollouts = [
        replace(
            r,
            reward=reward,
            turn_rewards=(*r.turn_rewards[:-1], r.turn_rewards[-1] - coefficient * penalties[i]),
        )
        for r, reward, i in zip(group.rollouts, rewards, ids, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))
