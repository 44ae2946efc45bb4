"""The rule of canary and waves, without a device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.fleet.rollout import Rollout, waves

NAMES = ("a", "b", "c", "d", "e", "f")


def _run(rollout, failing=()):
    seen = []
    while wave := rollout.next_wave():
        seen.append(wave)
        for name in wave:
            rollout.record(name, "failed" if name in failing else "deployed")
    return seen


def test_one_canary_then_waves():
    assert waves(NAMES, 4) == [("a",), ("b", "c", "d", "e"), ("f",)]
    assert waves(NAMES, 1) == [(n,) for n in NAMES]
    assert waves(NAMES[:1], 4) == [("a",)]
    assert waves((), 4) == []


def test_a_failed_canary_ends_it():
    rollout = Rollout(NAMES, 4)
    assert _run(rollout, {"a"}) == [("a",)]
    assert rollout.stopped
    assert rollout.finished() == {"a": "failed", **dict.fromkeys("bcdef", "not_tried")}


def test_a_failure_in_a_wave_ends_it_after_that_wave():
    rollout = Rollout(NAMES, 2)
    assert _run(rollout, {"b"}) == [("a",), ("b", "c")]
    assert rollout.finished()["c"] == "deployed"
    assert [rollout.finished()[n] for n in "def"] == ["not_tried"] * 3


def test_keep_going_tries_them_all():
    rollout = Rollout(NAMES, 2, keep_going=True)
    assert _run(rollout, {"a", "d"}) == [("a",), ("b", "c"), ("d", "e"), ("f",)]
    assert not rollout.stopped
    assert sorted(n for n, o in rollout.finished().items() if o == "failed") == ["a", "d"]


def test_no_wave_before_the_last_one_is_known():
    rollout = Rollout(NAMES, 2)
    rollout.next_wave()
    with pytest.raises(ValueError, match="outcome of a is not known"):
        rollout.next_wave()
    with pytest.raises(ValueError, match="b is not being deployed"):
        rollout.record("b", "deployed")
    rollout.record("a", "unchanged")
    with pytest.raises(ValueError, match="a is not being deployed"):
        rollout.record("a", "failed")


@pytest.mark.parametrize(("names", "size"), [(("a", "a"), 1), (("a",), 0)])
def test_bad_rollouts(names, size):
    with pytest.raises(ValueError):
        Rollout(names, size)


@given(
    count=st.integers(0, 12),
    size=st.integers(1, 5),
    keep_going=st.booleans(),
    data=st.data(),
)
def test_no_device_after_a_failed_wave_and_none_twice(count, size, keep_going, data):
    names = tuple(f"d{i}" for i in range(count))
    failing = set(data.draw(st.lists(st.sampled_from(names)))) if names else set()
    rollout = Rollout(names, size, keep_going)
    seen = _run(rollout, failing)
    tried = [name for wave in seen for name in wave]
    assert tried == list(names[: len(tried)])
    assert all(len(wave) <= (1 if i == 0 else size) for i, wave in enumerate(seen))
    if keep_going or not failing:
        assert tried == list(names)
    else:
        first = min(i for i, wave in enumerate(seen) if failing & set(wave))
        assert first == len(seen) - 1
