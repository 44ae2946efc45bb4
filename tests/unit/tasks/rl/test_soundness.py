"""Samples that contradict themselves are named before anything is made of them."""

import math
import pickle
from dataclasses import replace

import pytest

from configs.schema.rl_credit import (
    DrGrpoCredit,
    GrpoCredit,
    ReturnToGoCredit,
    RlooCredit,
    TurnGaeCredit,
)
from tasks.rl.batch import samples_of, without_credit
from tasks.rl.soundness import UnsoundSampleError, require_vocabulary
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn, VersionSpan

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
CREDITS = [GrpoCredit(), DrGrpoCredit(), RlooCredit(), ReturnToGoCredit(), TurnGaeCredit()]


def turn(start: int, end: int, *spans: VersionSpan) -> Turn:
    return Turn(start, end, StopReason.END_OF_TURN, V0, spans)


GOOD = Rollout(
    "s1", "row-7", "0", (4, 5, 6, 7), (False, False, True, True), (0.0, 0.0, -0.5, -1.0),
    (turn(2, 4),), 1.0,
)  # fmt: skip
OTHER = replace(GOOD, rollout_id="s2")


def batch(*rollouts: Rollout, turn_rewards=(1.0,)) -> list[Group]:
    first = ScoredRollout(rollouts[0], 1.0, 1.0, {}, turn_rewards)
    others = tuple(ScoredRollout(r, 0.0, 0.0, {}, (0.0,)) for r in rollouts[1:])
    return [Group("0", "row-7", (first, *others))]


UNSOUND = {
    "its rollout_id stands twice": replace(GOOD, rollout_id="s2"),
    "it has no token": replace(GOOD, token_ids=(), action_mask=(), sampler_logprobs=()),
    "4 tokens come with 3 of sampler_logprobs": replace(GOOD, sampler_logprobs=(0.0, 0.0, -0.5)),
    "4 tokens come with 5 of sampler_logprobs": replace(GOOD, sampler_logprobs=(0.0,) * 5),
    "4 tokens come with 3 of action_mask": replace(GOOD, action_mask=(False, False, True)),
    "temperature=0.0": replace(GOOD, temperature=0.0),
    "temperature=-1.0": replace(GOOD, temperature=-1.0),
    "temperature=nan": replace(GOOD, temperature=math.nan),
    "temperature=inf": replace(GOOD, temperature=math.inf),
    "it has no turn": replace(GOOD, turns=(), action_mask=(False,) * 4),
    r"turn \[0, 4\) must lie within \[1, 4\)": replace(
        GOOD, turns=(turn(0, 4),), action_mask=(True,) * 4
    ),
    r"turn \[2, 5\) must lie within": replace(GOOD, turns=(turn(2, 5),)),
    r"turn \[3, 2\) must lie within": replace(GOOD, turns=(turn(3, 2),)),
    r"turn \[2, 3\) must lie within \[4, 4\)": replace(GOOD, turns=(turn(2, 4), turn(2, 3))),
    "2 actions and 1 of them in turns": replace(GOOD, turns=(turn(3, 4),)),
    r"spans \[\(2, 3\)\] do not cover": replace(GOOD, turns=(turn(2, 4, VersionSpan(2, 3, V0)),)),
    r"spans \[\(0, 9\)\] do not cover": replace(GOOD, turns=(turn(2, 4, VersionSpan(0, 9, V0)),)),
    r"spans \[\(2, 3\), \(2, 4\)\] do not": replace(
        GOOD, turns=(turn(2, 4, VersionSpan(2, 3, V0), VersionSpan(2, 4, V1)),)
    ),
}


@pytest.mark.parametrize("credit", CREDITS, ids=lambda c: c.type)
@pytest.mark.parametrize("fault", UNSOUND)
def test_what_contradicts_itself_gets_no_credit(fault, credit):
    values = {"s1": [0.0], "s2": [0.0]}
    with pytest.raises(UnsoundSampleError, match=rf"sample s. of row row-7: .*{fault}"):
        samples_of(batch(UNSOUND[fault], OTHER), credit, values)


@pytest.mark.parametrize("fault", UNSOUND)
def test_nor_is_it_scored(fault):
    with pytest.raises(UnsoundSampleError, match=fault):
        without_credit(batch(UNSOUND[fault], OTHER), with_values=True)


@pytest.mark.parametrize("turn_rewards", [(), (0.0, 1.0)])
def test_each_turn_of_a_scored_sample_has_its_reward(turn_rewards):
    with pytest.raises(UnsoundSampleError, match=rf"{len(turn_rewards)} turn_rewards for 1 turns"):
        samples_of(batch(GOOD, OTHER, turn_rewards=turn_rewards), ReturnToGoCredit(), {})
    unscored = Group("0", "row-7", (ScoredRollout(GOOD, None, None),))
    assert [s.advantages for s in samples_of([unscored], GrpoCredit(), {})] == [[0.0] * 4]


@pytest.mark.parametrize("groups", [[], [Group("0", "row-7", (), excluded=4)]])
def test_a_batch_without_a_sample_is_named(groups):
    with pytest.raises(UnsoundSampleError, match=f"a batch of {len(groups)} groups holds no"):
        samples_of(groups, GrpoCredit(), {})


def test_a_nan_of_the_sampler_is_left_for_the_guard_of_the_step():
    nan = replace(GOOD, sampler_logprobs=(0.0, 0.0, math.nan, -1.0))
    first, second = samples_of(batch(nan, OTHER), DrGrpoCredit(), {})
    assert first.advantages == [0, 0, 0.5, 0.5] and second.advantages == [0, 0, -0.5, -0.5]


@pytest.mark.parametrize("said", [(), (VersionSpan(2, 3, V0), VersionSpan(3, 4, V1))])
def test_turns_of_one_or_several_versions_and_silent_ones_are_sound(said):
    silent = replace(
        GOOD, rollout_id="s3", action_mask=(False,) * 4, turns=(turn(2, 2), turn(4, 4))
    )
    groups = batch(replace(GOOD, turns=(turn(2, 4, *said),)), OTHER)
    quiet = Group("1", "row-7", (ScoredRollout(silent, 0.0, 0.0, {}, (0.0, 0.0)),))
    assert len(samples_of([*groups, quiet], RlooCredit(), {})) == 3


@pytest.mark.parametrize(("tokens", "place"), [((4, 8, 6, 7), 1), ((4, 5, 6, -1), 3)])
def test_tokens_outside_the_vocabulary_are_named(tokens, place):
    require_vocabulary(batch(GOOD), 8)
    message = f"sample s1 of row row-7: token {place} is {tokens[place]}; the model has 0 to 7"
    with pytest.raises(UnsoundSampleError, match=message) as caught:
        require_vocabulary(batch(replace(GOOD, token_ids=tokens)), 8)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
