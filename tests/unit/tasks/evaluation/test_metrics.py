"""Metrics against counts made by hand."""

import numpy as np
import pytest

from tasks.evaluation.metrics import (
    AnswerSetError,
    by_problem,
    correctness,
    evaluate,
    lengths,
    ordered_bands,
    stability,
    tool_error_share,
)
from tasks.evaluation.types import AnswerRecord
from tasks.rewards.verdict import Outcome

C, W, N, U = Outcome.CORRECT, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNSCORED


def answer(row="r", sample=0, outcome=C, normalised="7", **over):
    has = outcome in (C, W)
    fields = {
        "band": "easy",
        "seed": 0,
        "gold": "7",
        "extracted": normalised if has else None,
        "reason": "",
        "tokens": 4,
        "turns": 1,
        "truncated": False,
        "tool_calls": 0,
        "tool_errors": 0,
        "messages": (),
    }
    fields.update(over)
    form = normalised if has else None
    return AnswerRecord(row_id=row, sample=sample, outcome=outcome, normalised=form, **fields)


def test_bands_come_easiest_first_then_sorted():
    assert ordered_bands(["zeta", "hard", "easy", "alpha", "medium", "easy"]) == [
        "easy",
        "medium",
        "hard",
        "alpha",
        "zeta",
    ]


def test_accuracy_keeps_every_answer_in_the_denominator():
    # 2 correct of 8; 3 wrong, 2 without an answer, 1 unscored
    outcomes = [C, W, W, W, N, N, U, C]
    result = evaluate([answer(f"r{i // 2}", i % 2, o) for i, o in enumerate(outcomes)])
    assert result["accuracy"] == 2 / 8
    assert result["outcomes"] == {"correct": 2, "wrong": 3, "no_answer": 2, "unscored": 1}
    assert (result["n"], result["answers"]) == (4, 8)
    assert result["format_share"] == 5 / 8


def test_a13_unscored_is_an_error_and_never_correct():
    result = evaluate([answer("a", 0, U), answer("b", 0, C)])
    assert result["accuracy"] == 0.5
    assert result["outcomes"]["unscored"] == 1
    assert evaluate([answer("a", 0, U)])["accuracy"] == 0.0


def test_a15_no_answer_and_wrong_are_reported_apart():
    result = evaluate([answer("a", 0, N), answer("b", 0, W)])
    assert result["outcomes"] == {"correct": 0, "wrong": 1, "no_answer": 1, "unscored": 0}


def test_accuracy_by_band():
    records = [
        answer("h", 0, W, band="hard"),
        answer("h", 1, C, band="hard"),
        answer("e", 0, C, band="easy"),
        answer("e", 1, C, band="easy"),
    ]
    bands = evaluate(records)["by_band"]
    assert [(b["band"], b["accuracy"], b["n"]) for b in bands] == [
        ("easy", 1.0, 1),
        ("hard", 0.5, 1),
    ]
    # Wilson for 1 of 1: 1 / (1 + 3.8415) = 0.2065 … 1
    assert bands[0]["ci95"] == pytest.approx([0.2065, 1.0], abs=1e-4)


def test_stability_needs_every_sample_the_same_and_present():
    same = [answer("a", 0, W, "33"), answer("a", 1, W, "33")]  # wrong, but the same twice
    other = [answer("b", 0, C, "7"), answer("b", 1, W, "8")]
    silent = [answer("c", 0, N), answer("c", 1, N)]
    assert stability(same + other + silent) == pytest.approx(1 / 3)


def test_stability_of_a_single_sample_is_unknown():
    assert stability([answer("a"), answer("b")]) is None
    assert evaluate([answer("a")])["stability"] is None


def test_lengths_by_hand():
    found = lengths([answer(str(i), tokens=t) for i, t in enumerate([1, 2, 3, 4, 10])])
    # linear interpolation: p90 at position 3.6 is 4 + 0.6 * 6 = 7.6
    assert found == pytest.approx({"mean": 4.0, "p50": 3.0, "p90": 7.6, "p99": 9.76, "max": 10.0})


def test_tool_rates():
    records = [
        answer("a", tool_calls=2, tool_errors=1),
        answer("b", tool_calls=2, tool_errors=0),
        answer("c"),
    ]
    assert tool_error_share(records) == 0.25
    assert evaluate(records)["tool_use_share"] == pytest.approx(2 / 3)
    assert tool_error_share([answer("a")]) is None


def test_truncation_share():
    records = [answer("a", outcome=N, truncated=True), answer("b"), answer("c"), answer("d")]
    assert evaluate(records)["truncated_share"] == 0.25


def test_correctness_is_rows_by_samples_in_order_of_first_appearance():
    records = [
        answer("b", 1, C),
        answer("a", 0, W),
        answer("b", 0, W),
        answer("a", 1, C),
    ]
    np.testing.assert_array_equal(correctness(records), [[0, 1], [0, 1]])
    assert list(by_problem(records)) == ["b", "a"]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [answer("a", 0), answer("a", 0)],
        [answer("a", 0), answer("a", 1), answer("b", 0)],
        [answer("a", 1)],
    ],
    ids=["none", "twice", "missing", "first missing"],
)
def test_incomplete_answers_are_an_error(records):
    with pytest.raises(AnswerSetError):
        evaluate(records)
