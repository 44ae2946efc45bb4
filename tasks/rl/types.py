"""The engine's records and its glossary.

B samples in a batch, T tokens of the longest sequence, G samples in a group, K turns.

- `learner_version`: optimiser steps taken.
- `policy_version`: the learner_version whose weights an engine holds, stamped `(attempt, step)`.
- `sampler_logprobs` μ: as sampled, tempered, per token. `learner_logprobs` π_θ.
  `ref_logprobs`: the SFT snapshot. All at the sample's own temperature.
- `staleness_steps` = learner_version − oldest sampled token's policy_version.step.
- `action_mask`: True = a token the policy sampled and is trained on.
- position t of every per-token tensor speaks of token t, predicted from tokens < t; position 0 is
  never an action.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.sampling.types import Rollout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its rewards. `reward` is None where the grader could not tell (A04, A13)."""

    rollout: Rollout
    reward: float | None
    outcome: float | None
    components: dict[str, float] = field(default_factory=dict)
    """Reward parts by name, before weighting."""
    turn_rewards: tuple[float, ...] = ()
    """One per turn; the outcome falls on the last."""


@dataclass(frozen=True)
class Group:
    """Samples of one prompt; the unit that enters and leaves the buffer."""

    group_id: str
    row_id: str
    rollouts: tuple[ScoredRollout, ...]
    excluded: int = 0
    """Members the engine's answer was refused for: never trained on, their place in a batch stays
    empty."""

    @property
    def size(self) -> int:
        """Places it takes in the buffer and in a batch."""
        return len(self.rollouts) + self.excluded

    @property
    def newest_step(self) -> int:
        """Optimiser step of the newest sampled token in the group."""
        turns = (t for r in self.rollouts for t in r.rollout.turns)
        return max(max((t.policy_version, *(s.version for s in t.spans))).step for t in turns)

    @property
    def oldest_step(self) -> int:
        """Optimiser step of the oldest sampled token in the group."""
        return min(r.rollout.oldest_version.step for r in self.rollouts)


@dataclass(frozen=True)
class TrainBatch:
    """One optimiser step's samples, padded on the right."""

    token_ids_B_T: "torch.Tensor"
    """int64; padding is 0 and outside `valid_B_T`."""
    valid_B_T: "torch.Tensor"
    """bool; True = a real token, by length, never by id (A08)."""
    action_mask_B_T: "torch.Tensor"
    """bool; True = sampled by the policy and trained on."""
    sampler_logprobs_B_T: "torch.Tensor"
    """float32, nats; 0 where not an action."""
    advantages_B_T: "torch.Tensor"
    """float32; 0 where not an action."""
    temperature_B: "torch.Tensor"
    """float32."""
    sampler_steps_B_T: "torch.Tensor | None" = None
    """int64; step of the policy version that sampled each action, 0 elsewhere."""
    returns_B_T: "torch.Tensor | None" = None
    """float32; value targets at `value_mask_B_T`, where a value head is trained."""
    value_mask_B_T: "torch.Tensor | None" = None
    """bool; True = the last observation token before a turn."""


@dataclass(frozen=True)
class LossOutput:
    """A loss summed over tokens and already divided by the denominators passed in."""

    loss: "torch.Tensor"
    metrics: dict[str, "torch.Tensor"]
    """Detached sums or means; each name says which (`…_sum`, `…_mean`, `…_max`)."""
