"""Signs of reward hacking against hand-made metrics."""

import math

import pytest

from configs.schema.evaluation import DriftAlarms
from tasks.evaluation.drift import drift_signs, train_accuracy

ALARMS = DriftAlarms(max_length_ratio=2.0, max_format_drop=0.05, max_train_heldout_gap=0.15)


def side(length=10.0, readable=0.9, accuracy=0.5):
    return {"lengths": {"mean": length}, "format_share": readable, "accuracy": accuracy}


def test_quiet_run():
    signs = drift_signs(ALARMS, side(), side(length=20.0, readable=0.86), 0.6)
    assert [s["passed"] for s in signs] == [True, True, True]
    assert [s["value"] for s in signs] == pytest.approx([2.0, 0.04, 0.1])


@pytest.mark.parametrize("length", [20.1, 4.9])
def test_much_longer_or_shorter_alarms(length):
    assert not drift_signs(ALARMS, side(), side(length=length), 0.5)[0]["passed"]


def test_lost_format_and_gap_alarm():
    signs = drift_signs(ALARMS, side(), side(readable=0.8, accuracy=0.3), 0.5)
    assert [s["passed"] for s in signs] == [True, False, False]


def test_unknown_is_no_pass():
    signs = drift_signs(ALARMS, side(length=0.0), side(length=0.0), None)
    assert [(s["value"], s["passed"]) for s in (signs[0], signs[2])] == [(None, False)] * 2


def test_train_accuracy_is_the_mean_of_the_last_known():
    assert train_accuracy([0.0] * 5 + [0.5] * 10) == 0.5
    assert train_accuracy([0.2, None, math.nan, 0.4]) == pytest.approx(0.3)
    assert train_accuracy([None, math.nan]) is None
    assert train_accuracy([]) is None
