"""Groups to tensors: credit where the policy spoke, and nowhere else."""

import pytest
import torch

from configs.schema.rl_credit import DrGrpoCredit, GrpoCredit, TurnGaeCredit
from tasks.rl.batch import (
    collate,
    in_parts,
    rows_of,
    samples_of,
    silent,
    train_batches,
    without_credit,
)
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn

V0 = PolicyVersion(0, 0)


def rollout(name: str, layout: str, temperature: float = 1.0, group: str = "0") -> Rollout:
    """`layout`: one letter a token, `a` = action; each run of actions is a turn."""
    mask = [c == "a" for c in layout]
    starts = [i for i in range(len(mask)) if mask[i] and not mask[i - 1]]
    ends = [i + 1 for i in range(len(mask)) if mask[i] and not ([*mask, False])[i + 1]]
    return Rollout(
        rollout_id=name,
        row_id="row",
        group_id=group,
        token_ids=tuple(range(1, len(mask) + 1)),
        action_mask=tuple(mask),
        sampler_logprobs=tuple(-0.5 if m else 0.0 for m in mask),
        turns=tuple(
            Turn(s, e, StopReason.END_OF_TURN, V0) for s, e in zip(starts, ends, strict=True)
        ),
        temperature=temperature,
    )


def scored(name, layout, reward, turn_rewards=None, temperature=1.0, group="0") -> ScoredRollout:
    played = rollout(name, layout, temperature, group)
    default = (0.0,) * (len(played.turns) - 1) + (reward or 0.0,)
    return ScoredRollout(played, reward, reward, {}, turn_rewards or default)


def test_group_credit_falls_on_every_action_and_no_observation():
    # Rewards 1, 0: mean ½, so ±½; the sample without a score has none.
    group = Group(
        "0", "row", (scored("a", "paapa", 1.0), scored("b", "pa", 0.0), scored("c", "pa", None))
    )
    samples = samples_of([group], DrGrpoCredit(), {})
    assert [s.advantages for s in samples] == [[0, 0.5, 0.5, 0, 0.5], [0, -0.5], [0, 0]]


def test_grpo_is_taken_within_each_group():
    groups = [
        Group("0", "row", (scored("a", "pa", 1.0), scored("b", "pa", 0.0))),
        Group("1", "row", (scored("c", "pa", 1.0), scored("d", "pa", 1.0))),
    ]
    advantages = [s.advantages[1] for s in samples_of(groups, GrpoCredit(), {})]
    assert advantages == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)


def test_turn_gae_by_hand():
    # γ = ½, λ = 1, rewards (0, 1), values (.2, .4): δ₂ = .6, δ₁ = 0 + ½·.4 − .2 = 0;
    # A₂ = .6, A₁ = 0 + ½·.6 = .3; returns A + V = .5 and 1. V stands at the token before a turn.
    credit = TurnGaeCredit(gamma=0.5, lam=1.0, normalise=False)
    group = Group("0", "row", (scored("a", "ppaaoa", 1.0), scored("b", "pa", None)))
    first, second = samples_of([group], credit, {"a": [0.2, 0.4], "b": [0.9]})
    assert first.advantages == pytest.approx([0, 0, 0.3, 0.3, 0, 0.6])
    assert first.returns == pytest.approx([0, 0.5, 0, 0, 1.0, 0])
    assert first.value_mask == [False, True, False, False, True, False]
    assert second.advantages == [0, 0] and second.value_mask == [False, False]


def test_a_batch_is_padded_by_length_and_keeps_each_temperature():
    group = Group("0", "row", (scored("a", "paa", 1.0, temperature=0.7), scored("b", "pa", 0.0)))
    (batch,) = train_batches(samples_of([group], DrGrpoCredit(), {}), 100)
    assert batch.token_ids_B_T.tolist() == [[1, 2, 3], [1, 2, 0]]
    assert batch.valid_B_T.tolist() == [[True] * 3, [True, True, False]]
    assert batch.action_mask_B_T.tolist() == [[False, True, True], [False, True, False]]
    assert batch.sampler_logprobs_B_T.tolist() == [[0, -0.5, -0.5], [0, -0.5, 0]]
    assert batch.temperature_B.tolist() == pytest.approx([0.7, 1.0])
    assert batch.advantages_B_T.tolist() == [[0, 0.5, 0.5], [0, -0.5, 0]]
    assert batch.returns_B_T is None and batch.value_mask_B_T is None


@pytest.mark.parametrize("budget", [1, 5, 12, 1000])
def test_scoring_and_training_cut_the_batch_alike(budget):
    layouts = ["pa", "ppaa", "paoa", "p" * 9 + "a", "paaa", "pa"]
    group = Group("0", "row", tuple(scored(str(i), x, i % 2) for i, x in enumerate(layouts)))
    credited = samples_of([group], GrpoCredit(), {})
    bare = without_credit([group], with_values=True)
    assert rows_of(credited, budget) == rows_of(bare, budget)
    for one, two in zip(train_batches(credited, budget), train_batches(bare, budget), strict=True):
        assert torch.equal(one.token_ids_B_T, two.token_ids_B_T)
        assert torch.equal(one.action_mask_B_T, two.action_mask_B_T)
        assert two.returns_B_T is not None and not two.advantages_B_T.any()
    assert sorted(i for rows in rows_of(bare, budget) for i in rows) == list(range(6))


def test_an_episode_that_said_nothing_is_carried_and_teaches_nothing():
    silent = ScoredRollout(
        Rollout("s", "row", "0", (1, 2), (False, False), (0.0, 0.0),
                (Turn(2, 2, StopReason.CONTEXT_FULL, V0),), 1.0),
        0.0, 0.0, {}, (0.0,),
    )  # fmt: skip
    group = Group("0", "row", (silent, scored("b", "pa", 1.0)))
    (batch,) = train_batches(samples_of([group], DrGrpoCredit(), {}), 100)
    assert not batch.action_mask_B_T[0].any() and not batch.advantages_B_T[0].any()
    assert batch.advantages_B_T[1].tolist() == [0, 0.5]


def test_parts_hold_whole_groups():
    groups = [
        Group(str(g), "row", tuple(scored(f"{g}.{i}", "pa", 1.0, group=str(g)) for i in range(2)))
        for g in range(5)
    ]
    samples = without_credit(groups, with_values=False)

    def names(parts):
        return [[s.scored.rollout.group_id for s in part] for part in parts]

    assert names(in_parts(samples, 2)) == [["0", "0", "2", "2", "4", "4"], ["1", "1", "3", "3"]]
    assert in_parts(samples, 1) == [samples]
    assert len(in_parts(samples, 9)) == 5  # no step without a sample


def test_a_silent_batch_trains_nothing_and_keeps_its_shape():
    group = Group("0", "row", (scored("a", "paa", 1.0), scored("b", "pa", 0.0)))
    batch = collate(without_credit([group], with_values=True))
    quiet = silent(batch)
    assert not quiet.action_mask_B_T.any() and not quiet.value_mask_B_T.any()
    assert torch.equal(quiet.token_ids_B_T, batch.token_ids_B_T)
    assert batch.action_mask_B_T.any()  # the batch itself is as it was
