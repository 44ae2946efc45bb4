"""Groups to tensors: credit per token, padded micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from configs.schema.rl_credit import Credit, GroupCredit, ReturnToGoCredit, TurnGaeCredit
from tasks.models.batching import micro_batches, pad_rows, valid_by_length
from tasks.rl.credit import (
    broadcast_turns,
    group_credit,
    normalise_advantages,
    return_to_go_loo,
    turn_gae,
)
from tasks.rl.soundness import require_sound
from tasks.rl.types import Group, ScoredRollout, TrainBatch
from tasks.sampling.types import Rollout

TurnValues = Mapping[str, Sequence[float]]
"""rollout_id → V before each turn, from the value head."""


@dataclass(frozen=True)
class Sample:
    """One rollout with its credit; every per-token list has T elements."""

    scored: ScoredRollout
    advantages: list[float]
    returns: list[float] | None = None
    value_mask: list[bool] | None = None


def samples_of(groups: Sequence[Group], credit: Credit, values: TurnValues) -> list[Sample]:
    """Every rollout of the batch with its advantages; unscored ones have none.

    Raises:
        UnsoundSampleError: a sample contradicts itself.
    """
    require_sound(groups)
    if isinstance(credit, TurnGaeCredit):
        return _turn_samples([r for g in groups for r in g.rollouts], credit, values)
    samples = []
    for group in groups:
        advantages = _group_advantages(group, credit)
        for scored, turns in zip(group.rollouts, advantages, strict=True):
            samples.append(Sample(scored, _spread(scored, turns)))
    return samples


def _group_advantages(group: Group, credit: GroupCredit | ReturnToGoCredit) -> list[list[float]]:
    """One advantage for each turn of each sample; 0 where a sample has no score."""
    turns = [len(r.rollout.turns) for r in group.rollouts]
    if isinstance(credit, ReturnToGoCredit):
        rewards = [None if r.reward is None else r.turn_rewards for r in group.rollouts]
        credited = return_to_go_loo(rewards, credit.gamma, row_id=group.row_id)
        return [a or [0.0] * count for a, count in zip(credited, turns, strict=True)]
    whole = group_credit([r.reward for r in group.rollouts], credit, row_id=group.row_id)
    return [[a] * count for a, count in zip(whole, turns, strict=True)]


def _spread(scored: ScoredRollout, per_turn: Sequence[float]) -> list[float]:
    rollout = scored.rollout
    return broadcast_turns(per_turn, rollout.turns, len(rollout.token_ids))


def _turn_samples(
    rollouts: Sequence[ScoredRollout], credit: TurnGaeCredit, values: TurnValues
) -> list[Sample]:
    """Turn-level GAE. An episode cut off by its token budget ends there: it is graded as it
    stands, so nothing is bootstrapped beyond the last turn."""
    scored = [r for r in rollouts if r.reward is not None]
    pairs = [
        turn_gae(
            r.turn_rewards, values[r.rollout.rollout_id], 0.0, credit.gamma, credit.lam,
            row_id=r.rollout.row_id,
        )
        for r in scored
    ]  # fmt: skip
    advantages = [a for a, _ in pairs]
    if credit.normalise:
        advantages = normalise_advantages(advantages)
    credited = {
        r.rollout.rollout_id: (a, returns)
        for r, a, (_, returns) in zip(scored, advantages, pairs, strict=True)
    }
    return [_turn_sample(r, credited.get(r.rollout.rollout_id)) for r in rollouts]


def _turn_sample(scored: ScoredRollout, credited: tuple[list[float], list[float]] | None) -> Sample:
    length = len(scored.rollout.token_ids)
    returns, mask = [0.0] * length, [False] * length
    if credited is None:
        return Sample(scored, [0.0] * length, returns, mask)
    advantages, targets = credited
    for turn, target in zip(scored.rollout.turns, targets, strict=True):
        returns[turn.start - 1] = target
        mask[turn.start - 1] = True
    return Sample(scored, _spread(scored, advantages), returns, mask)


def turn_advantages(sample: Sample) -> tuple[float, ...]:
    """The advantage of each turn, which all its tokens share; 0 for a turn without tokens."""
    turns = sample.scored.rollout.turns
    return tuple(sample.advantages[t.start] if t.start < t.end else 0.0 for t in turns)


def train_batches(
    samples: Sequence[Sample], max_tokens: int, *, packed: bool = False
) -> list[TrainBatch]:
    """Micro-batches of similar lengths, at most `max_tokens` computed tokens each."""
    rows = rows_of(samples, max_tokens, packed=packed)
    return [collate([samples[i] for i in indices]) for indices in rows]


def rows_of(
    samples: Sequence[Sample], max_tokens: int, *, packed: bool = False, ranks: int = 1
) -> list[list[int]]:
    """Which samples make up each micro-batch; depends on lengths and groups alone. Several ranks
    get equally many, `rows_of(...)[rank::ranks]` each, of which some may be empty."""
    lengths = [len(s.scored.rollout.token_ids) for s in samples]
    groups = [s.scored.rollout.group_id for s in samples] if packed else None
    return micro_batches(lengths, max_tokens, packed=packed, families=groups, multiple_of=ranks)


def in_parts(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """The batch cut into parts of whole groups, one an optimiser step; fewer where it has fewer
    groups."""
    order = {name: i for i, name in enumerate({s.scored.rollout.group_id: None for s in samples})}
    cut: list[list[Sample]] = [[] for _ in range(min(parts, len(order)))]
    for sample in samples:
        cut[order[sample.scored.rollout.group_id] % len(cut)].append(sample)
    return cut


def without_credit(groups: Sequence[Group], *, with_values: bool) -> list[Sample]:
    """Samples before any credit is known, for a pass that only scores them.

    Raises:
        UnsoundSampleError: a sample contradicts itself.
    """
    require_sound(groups)
    samples = []
    for scored in (r for g in groups for r in g.rollouts):
        nothing = [0.0] * len(scored.rollout.token_ids)
        samples.append(Sample(scored, nothing, nothing if with_values else None))
    return samples


def collate(samples: Sequence[Sample]) -> TrainBatch:
    """One micro-batch of at least one sample, padded on the right."""
    rollouts = [s.scored.rollout for s in samples]
    with_values = samples[0].returns is not None
    return TrainBatch(
        token_ids_B_T=pad_rows([r.token_ids for r in rollouts], torch.long),
        valid_B_T=valid_by_length([len(r.token_ids) for r in rollouts]),
        action_mask_B_T=pad_rows([r.action_mask for r in rollouts], torch.bool),
        sampler_logprobs_B_T=pad_rows([r.sampler_logprobs for r in rollouts], torch.float32),
        advantages_B_T=pad_rows([s.advantages for s in samples], torch.float32),
        temperature_B=torch.tensor([r.temperature for r in rollouts]),
        sampler_steps_B_T=pad_rows([_sampler_steps(r) for r in rollouts], torch.long),
        returns_B_T=_optional(samples, "returns", torch.float32) if with_values else None,
        value_mask_B_T=_optional(samples, "value_mask", torch.bool) if with_values else None,
    )


def silent(batch: TrainBatch) -> TrainBatch:
    """The batch with nothing trained: what a rank without samples of its own computes, so that
    every rank makes the same calls."""
    nothing = torch.zeros_like(batch.action_mask_B_T)
    without_values = batch.value_mask_B_T is None
    return replace(
        batch, action_mask_B_T=nothing, value_mask_B_T=None if without_values else nothing
    )


def on_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """The batch with every tensor there."""
    parts = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{k: v.to(device) for k, v in parts.items() if v is not None})


def _sampler_steps(rollout: Rollout) -> list[int]:
    """Step of the version that sampled each token; 0 on prompt and observations."""
    steps = [0] * len(rollout.token_ids)
    for start, end, version in (span for turn in rollout.turns for span in turn.versions):
        steps[start:end] = [version.step] * (end - start)
    return steps


def _optional(samples: Sequence[Sample], name: str, dtype: torch.dtype) -> torch.Tensor:
    return pad_rows([getattr(s, name) or [] for s in samples], dtype)
