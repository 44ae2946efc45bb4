"""The ring: whole batches, nothing too old, nothing lost, never over its capacity."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl.buffer import BufferOverflowError, RolloutBuffer
from tasks.rl.staleness import FutureSampleError
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn, VersionSpan


def group(name: int | str, step: int, size: int = 4, newer: int = 0) -> Group:
    """A group whose oldest token is of `step`; its other samples are `newer` steps newer."""
    rollouts = []
    for i in range(size):
        version = PolicyVersion(0, step + (newer if i else 0))
        turn = Turn(1, 3, StopReason.END_OF_TURN, version)
        rollout = Rollout(
            f"{name}.{i}", "row", str(name), (1, 2, 3), (False, True, True), (0.0, -1.0, -1.0),
            (turn,), 1.0,
        )  # fmt: skip
        rollouts.append(ScoredRollout(rollout, 0.0, 0.0))
    return Group(str(name), "row", tuple(rollouts))


def names(groups) -> list[str]:
    return [g.group_id for g in groups]


@settings(deadline=None, max_examples=150)
@given(
    order=st.sampled_from(["freshest", "fifo"]),
    limit=st.integers(0, 4),
    actions=st.lists(st.tuples(st.sampled_from(["put", "take", "step"]), st.integers(0, 4))),
)
def test_what_goes_in_comes_out_once_and_never_too_old(order, limit, actions):
    buffer, learner, inside, serial = RolloutBuffer(24, order), 0, set(), 0
    for name, number in actions:
        if name == "put":
            serial += 1
            inside.add(str(serial))
            inside -= set(names(buffer.put(group(serial, max(0, learner - number)))))
        elif name == "take":
            taken = buffer.take(8, learner, limit)
            assert sum(len(g.rollouts) for g in taken.groups) in (0, 8)
            assert all(learner - g.oldest_step <= limit for g in taken.groups)
            assert all(learner - g.oldest_step > limit for g in taken.dropped)
            gone = names([*taken.groups, *taken.dropped])
            assert len(set(gone)) == len(gone) and set(gone) <= inside
            inside -= set(gone)
        else:
            learner += 1
        assert buffer.samples == 4 * len(inside) <= 24


def test_freshest_first_and_first_in_first_out():
    for order, expected in (("freshest", ["c", "b"]), ("fifo", ["a", "b"])):
        buffer = RolloutBuffer(40, order)
        for name, step in (("a", 1), ("b", 2), ("c", 3)):
            buffer.put(group(name, step))
        assert names(buffer.take(8, 3, 9).groups) == expected


def test_equally_fresh_groups_keep_their_order():
    buffer = RolloutBuffer(40, "freshest")
    for name in ("a", "b", "c"):
        buffer.put(group(name, 5))
    assert names(buffer.take(8, 5, 0).groups) == ["a", "b"]


def test_too_old_groups_are_dropped_by_their_oldest_token_even_without_a_batch():
    buffer = RolloutBuffer(40, "fifo")
    buffer.put(group("mixed", 2, newer=3))
    buffer.put(group("fresh", 4))
    taken = buffer.take(8, 5, 2)
    assert names(taken.dropped) == ["mixed"] and taken.groups == ()
    assert buffer.samples == 4


def test_age_at_the_limit_is_trained_on():
    buffer = RolloutBuffer(40, "fifo")
    buffer.put(group("a", 3))
    assert names(buffer.take(4, 5, 2).groups) == ["a"]


def test_eviction_takes_the_oldest_version_first():
    buffer = RolloutBuffer(8, "freshest")
    buffer.put(group("newer", 7))
    buffer.put(group("older", 3))
    assert names(buffer.put(group("newest", 8))) == ["older"]
    assert names(buffer.put(group("ancient", 1))) == ["ancient"]
    assert names(buffer.take(8, 8, 9).groups) == ["newest", "newer"]


def test_a_group_larger_than_the_ring_is_an_error():
    with pytest.raises(BufferOverflowError, match="capacity_batches"):
        RolloutBuffer(3, "fifo").put(group("a", 0))


def test_fresh_share_counts_the_newest_policys_samples():
    buffer = RolloutBuffer(40, "fifo")
    assert buffer.fresh_share(8, 0) == 0
    buffer.put(group("old", 3))
    buffer.put(group("new", 4))
    assert buffer.fresh_share(8, 4) == 0.5
    assert buffer.fresh_share(8, 3) == buffer.fresh_share(4, 4) == 1.0


def test_samples_of_an_unborn_policy_are_an_error():
    buffer = RolloutBuffer(40, "fifo")
    buffer.put(group("future", 9))
    with pytest.raises(FutureSampleError):
        buffer.take(4, 8, 2)


def test_groups_of_other_sizes_fill_a_batch_exactly():
    buffer = RolloutBuffer(40, "fifo")
    for name, size in (("a", 4), ("b", 6), ("c", 4)):
        buffer.put(group(name, 0, size))
    assert names(buffer.take(8, 0, 0).groups) == ["a", "c"]
    assert buffer.samples == 6


def test_newer_samples_may_push_older_ones_out_but_not_one_another():
    buffer = RolloutBuffer(12, "freshest")
    assert buffer.room(0, running=0) == 12
    buffer.put(group("a", 1))
    buffer.put(group("b", 2))
    assert buffer.room(2, running=0) == 8  # a, of step 1, would make way
    assert buffer.room(1, running=0) == 4
    assert buffer.room(3, running=4) == 8
    assert buffer.room(2, running=12) == 0


def test_a_group_whose_members_were_refused_keeps_their_places():
    buffer = RolloutBuffer(12, "fifo")
    buffer.put(replace(group("a", 0, size=2), excluded=2))
    buffer.put(group("b", 0))
    assert buffer.samples == 8 and buffer.room(0, running=0) == 4
    taken = buffer.take(8, 0, 0).groups
    assert names(taken) == ["a", "b"] and [len(g.rollouts) for g in taken] == [2, 4]


def test_what_is_too_old_is_evicted_without_a_batch():
    buffer = RolloutBuffer(24, "freshest")
    for name, step in (("a", 1), ("b", 3), ("c", 2)):
        buffer.put(group(name, step))
    assert names(buffer.evict(4, 1)) == ["a", "c"] and buffer.evict(4, 1) == ()
    assert buffer.samples == 4 and names(buffer.take(4, 4, 1).groups) == ["b"]


def test_the_age_of_a_group_is_of_its_oldest_token_even_within_a_turn():
    (mixed,) = group("a", 5, size=1).rollouts
    old, new = PolicyVersion(0, 3), PolicyVersion(0, 5)
    spans = (VersionSpan(1, 2, old), VersionSpan(2, 3, new))
    turn = Turn(1, 3, StopReason.END_OF_TURN, old, spans)
    carried = Group("a", "row", (replace(mixed, rollout=replace(mixed.rollout, turns=(turn,))),))
    assert (carried.oldest_step, carried.newest_step) == (3, 5)
    assert turn.versions == spans and turn.oldest_version == old
    whole = replace(turn, spans=())
    assert whole.versions == (VersionSpan(1, 3, old),) and replace(whole, end=1).versions == ()
    buffer = RolloutBuffer(8, "fifo")
    buffer.put(carried)
    assert buffer.fresh_share(1, 5) == 0.0 and buffer.evict(6, 2) == (carried,)
