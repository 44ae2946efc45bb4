"""The rules the benches of the engine stand on."""

from pathlib import Path

import numpy as np
import pytest
from async_agent import Moment, configured, merged, ratio_of_medians, time_to
from async_tasks import (
    ANSWERS,
    HELDOUT_ROWS,
    SHOWN,
    TERMS,
    TRAIN_ROWS,
    calculator_rows,
    counting_messages,
    counting_rows,
    demonstrations,
)

from tasks.environments.row import Row
from tasks.rewards.verifiers import verify


class Known:
    """A judge that knows the accuracy of each file, and counts how often it is asked."""

    def __init__(self, accuracies):
        self._accuracies = accuracies
        self.asked = []

    def accuracy(self, weights):
        self.asked.append(weights.name)
        return self._accuracies[int(weights.name)]


def moments(count):
    """Steps 1 … count, two seconds each."""
    return [Moment(step, 2.0 * step, Path(str(step))) for step in range(1, count + 1)]


def test_time_to_is_the_first_moment_at_the_target():
    judge = Known({1: 0.2, 2: 0.69, 3: 0.7, 4: 0.9})
    reached = time_to(0.7, moments(4), judge, every=1)
    assert (reached.seconds, reached.step) == (6.0, 3)
    assert reached.curve == ((1, 2.0, 0.2), (2, 4.0, 0.69), (3, 6.0, 0.7))
    assert judge.asked == ["1", "2", "3"]


def test_time_to_looks_at_every_nth_step_only():
    judge = Known({2: 0.5, 4: 0.8})
    reached = time_to(0.6, moments(5), judge, every=2)
    assert (reached.seconds, reached.step) == (8.0, 4)
    assert judge.asked == ["2", "4"]


@pytest.mark.parametrize("count", [0, 3])
def test_a_target_never_reached_is_said(count):
    reached = time_to(0.6, moments(count), Known(dict.fromkeys(range(9), 0.59)), every=1)
    assert (reached.seconds, reached.step, len(reached.curve)) == (None, None, count)


def test_merged_goes_deep_and_replaces_another_type():
    base = {"a": {"type": "ray", "x": 1, "y": 2}, "b": 1}
    assert merged(base, {"a": {"x": 3}}) == {"a": {"type": "ray", "x": 3, "y": 2}, "b": 1}
    assert merged(base, {"a": {"type": "inline"}}) == {"a": {"type": "inline"}, "b": 1}
    assert base == {"a": {"type": "ray", "x": 1, "y": 2}, "b": 1}


def test_both_tasks_have_the_calculators_batch_and_adapter():
    multi, single = configured("multi", {}), configured("single", {"rl": {"steps": 7}})
    for config in (multi, single):
        assert (config.rl.batch_size, config.rl.group_size) == (128, 8)
        assert (config.rl.trainable.r, config.rl.kl.coefficient) == (16, 0.0)
    assert (multi.tools, multi.rl.sampling.max_turns) == (("calc",), 2)
    assert (single.tools, single.rl.sampling.max_turns, single.rl.steps) == ((), 1, 7)


def test_counting_pays_upwards_only():
    row = Row(id="x", prompt="count 214 by 3", answer="235", meta={"start": 214, "by": 3})
    up, down = (counting_messages(row, sign)[1]["content"] for sign in (+1, -1))
    assert up == "217 220 223 226 229 232 235"
    assert down == "211 208 205 202 199 196 193"
    assert verify("number", row.answer, up).score == 1.0
    assert verify("number", row.answer, down).score == 0.0


@pytest.mark.parametrize("make", [calculator_rows, counting_rows])
def test_rows_are_distinct_and_enough(make):
    rows = make()
    assert len({r.prompt for r in rows}) >= 0.99 * len(rows)
    assert len({r.id for r in rows}) == len(rows) == TRAIN_ROWS + HELDOUT_ROWS
    assert [r.id for r in rows] == [r.id for r in make()], "the same on every machine"


def test_demonstrations_show_the_right_way_three_times_in_ten():
    rows = counting_rows()[:500]
    shown = demonstrations("single", rows)
    answers = {r.id: r.answer for r in rows}
    right = [d.messages[-1]["content"].endswith(answers[d.row_id]) for d in shown]
    assert len(shown) == 500 * SHOWN
    assert np.mean(right) == pytest.approx(0.3, abs=0.05)
    assert len(shown[0].messages[-1]["content"].split()) == TERMS
    multi = demonstrations("multi", calculator_rows()[:500])
    after = [d for d in multi if d.learn_from]
    assert len(after) == 500 * ANSWERS
    assert all(d.messages[d.learn_from]["role"] == "assistant" for d in after)
    called = [len(d.messages) == 4 for d in multi if not d.learn_from]
    assert np.mean(called) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    ("ours", "other", "ratio"),
    [
        ([10.0, 20.0, 30.0], [40.0, 10.0, 90.0], 2.0),
        ([10.0, 20.0, None], [40.0, 50.0, None], 2.5),
        ([10.0, None, None], [40.0, 50.0, 60.0], None),
        ([10.0, 20.0, 30.0], [40.0, None, None], None),
    ],
)
def test_a_run_that_never_arrives_counts_as_the_longest(ours, other, ratio):
    assert ratio_of_medians(ours, other) == ratio
