"""Every credit reaches the tokens of its turn, and every token knows who sampled it."""

import pytest

from configs.schema.rl_credit import ReturnToGoCredit, RlooCredit
from tasks.rl.batch import samples_of, train_batches
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn, VersionSpan

V2, V5 = PolicyVersion(0, 2), PolicyVersion(1, 5)


def scored(name, turns, reward, turn_rewards=(), length=8, spans=()) -> ScoredRollout:
    """An episode whose turns are spans of `length` tokens; the first token is the prompt."""
    mask = [any(start <= t < end for start, end in turns) for t in range(length)]
    rollout = Rollout(
        rollout_id=name, row_id="row", group_id="0", token_ids=tuple(range(length)),
        action_mask=tuple(mask), sampler_logprobs=(-0.5,) * length,
        turns=tuple(Turn(s, e, StopReason.END_OF_TURN, V2, spans) for s, e in turns),
        temperature=1.0,
    )  # fmt: skip
    return ScoredRollout(rollout, reward, reward, {}, turn_rewards or (0.0,) * len(turns))


def test_rloo_falls_on_every_action():
    # 1 − (0 + ½)/2, 0 − (1 + ½)/2, ½ − (1 + 0)/2
    rollouts = [scored(str(r), [(1, 3)], r, length=3) for r in (1.0, 0.0, 0.5)]
    found = samples_of([Group("0", "row", tuple(rollouts))], RlooCredit(), {})
    assert [s.advantages for s in found] == [[0, 0.75, 0.75], [0, -0.75, -0.75], [0, 0, 0]]


def test_return_to_go_falls_on_its_own_turn():
    # γ ½. First: r (0, 1): G = (½, 1). Second: one turn, r 0: G = 0. Third: unscored.
    # Turn 0: ½ − 0 and 0 − ½; turn 1: nobody else reached it, so 1.
    group = Group(
        "0", "row",
        (
            scored("a", [(1, 3), (5, 6)], 1.0, (0.0, 1.0)),
            scored("b", [(2, 4)], 0.0, (0.0,)),
            scored("c", [(1, 2)], None, (0.0,)),
        ),
    )  # fmt: skip
    first, second, third = samples_of([group], ReturnToGoCredit(gamma=0.5), {})
    assert first.advantages == [0, 0.5, 0.5, 0, 0, 1.0, 0, 0]
    assert second.advantages == [0, 0, -0.5, -0.5, 0, 0, 0, 0]
    assert third.advantages == [0] * 8
    assert first.returns is None


def test_a_group_with_one_score_teaches_nothing_by_return_to_go():
    group = Group(
        "0", "row", (scored("a", [(1, 3)], 1.0, (1.0,)), scored("b", [(1, 2)], None, (0.0,)))
    )
    assert not any(any(s.advantages) for s in samples_of([group], ReturnToGoCredit(), {}))


@pytest.mark.parametrize(
    ("spans", "steps"),
    [
        ((), [0, 2, 2, 2, 0]),
        ((VersionSpan(1, 2, V2), VersionSpan(2, 4, V5)), [0, 2, 5, 5, 0]),
    ],
)
def test_every_action_carries_the_step_of_the_version_that_sampled_it(spans, steps):
    group = Group("0", "row", (scored("a", [(1, 4)], 1.0, length=5, spans=spans),))
    (batch,) = train_batches(samples_of([group], RlooCredit(), {}), 100)
    assert batch.sampler_steps_B_T.tolist() == [steps]
