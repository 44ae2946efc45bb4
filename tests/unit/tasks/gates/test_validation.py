"""Great Expectations gates: verdicts, failing rows, nothing evaluated, threads."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from tasks.gates.dataset import COLUMNS, DatasetLimits, dataset_frame, dataset_suite
from tasks.gates.validation import validate_file, validate_frame

LIMITS = DatasetLimits(min_rows=1, max_prompt_chars=100)


def rows(*prompts, answer="1", kind="number"):
    return [
        {"row": f"n{i}", "id": f"id{i}", "prompt": p, "answer": answer, "answer_kind": kind}
        for i, p in enumerate(prompts)
    ]


def gate(frame, limits=LIMITS):
    return validate_frame(frame, dataset_suite("train", limits))


def codes(verdict):
    return {check.code for check in verdict.failed_checks}


def test_sound_rows_pass_and_row_count_is_asked_first():
    verdict = gate(dataset_frame(rows("p", "q")))
    assert (verdict.passed, verdict.evaluated_rows, verdict.row_failures) == (True, 2, ())
    assert [check.code for check in verdict.checks][:2] == ["row_count", "columns"]
    assert verdict.why() == ""


def test_a23_no_rows_fail_although_every_row_check_passes():
    verdict = gate(dataset_frame([]))
    assert verdict.passed is False
    assert codes(verdict) == {"row_count"}
    assert verdict.why().startswith("no rows to evaluate")


def test_a23_no_rows_fail_even_where_the_suite_asks_for_none():
    assert gate(dataset_frame([]), DatasetLimits(0, 100)).passed is False


def test_a23_an_all_null_column_fails():
    verdict = gate(dataset_frame(rows(None, None)))
    assert {"prompt_missing", "prompt_no_text"} <= codes(verdict)
    assert {f.row for f in verdict.row_failures} == {"n0", "n1"}


def test_a23_a_missing_file_fails(tmp_path):
    suite = dataset_suite("train", LIMITS)
    verdict = validate_file(tmp_path / "no.jsonl", suite, lambda path: dataset_frame([]))
    assert (verdict.passed, verdict.evaluated_rows) == (False, 0)
    assert verdict.why().endswith("no.jsonl: no such file")
    (tmp_path / "yes.jsonl").write_text("")
    assert validate_file(tmp_path / "yes.jsonl", suite, lambda _: dataset_frame(rows("p"))).passed


def test_a23_a_missing_column_fails_and_names_itself():
    verdict = gate(dataset_frame(rows("p")).drop(columns=["answer"]))
    assert {"columns", "answer_missing"} <= codes(verdict)
    assert 'column "answer"' in verdict.why()


@pytest.mark.parametrize(
    ("value", "state", "failing"),
    [
        (None, "none", {"prompt_missing", "prompt_no_text", "duplicate_prompt"}),
        (math.nan, "nan", {"prompt_missing", "prompt_no_text", "duplicate_prompt"}),
        ("", "empty", {"prompt_no_text", "duplicate_prompt"}),
        (" \u200b", "empty", {"prompt_no_text", "duplicate_prompt"}),
        ("nan", "nan_word", {"prompt_no_text"}),
        (7, "not_text", {"prompt_no_text", "duplicate_prompt"}),
        ("text", "text", set()),
    ],
)
def test_a23_missing_values_are_told_apart(value, state, failing):
    frame = dataset_frame(rows(value))
    assert list(frame["prompt_state"]) == [state]
    assert codes(gate(frame)) == failing


def test_a23_the_word_nan_may_be_the_answer_of_a_text_question():
    assert gate(dataset_frame(rows("p", answer="nan", kind="text"))).passed
    assert "unparseable_answer" not in codes(gate(dataset_frame(rows("p", answer="nan"))))
    assert codes(gate(dataset_frame(rows("p", answer="nan")))) == {"answer_no_text"}


@pytest.mark.parametrize(
    ("condition", "passed", "part"),
    [
        ('answer == "1"', True, ""),
        ('answer == "2"', False, "evaluated nothing: its row condition selects no row"),
    ],
)
def test_a23_a_row_condition_that_selects_nothing_fails(condition, passed, part):
    import great_expectations.expectations.core as gxe

    check = gxe.ExpectColumnValuesToBeInSet(
        column="prompt",
        value_set=["p", "q"],
        row_condition=condition,
        condition_parser="pandas",
        meta={"code": "some"},
    )
    verdict = validate_frame(dataset_frame(rows("p", "q")), ("conditional", [check]))
    assert verdict.passed is passed and part in verdict.why()


def test_a23_a_value_check_on_a_column_of_nulls_fails_although_nulls_are_no_fault():
    import great_expectations.expectations.core as gxe

    frame = pd.DataFrame({"row": ["a", "b"], "x": pd.Series([None, None], dtype=object)})
    check = gxe.ExpectColumnValuesToBeBetween(column="x", min_value=0, meta={"code": "range"})
    verdict = validate_frame(frame, ("nulls", [check]))
    assert (verdict.passed, codes(verdict)) == (False, {"range"})
    assert "every value is missing" in verdict.why()
    one = pd.DataFrame({"row": ["a", "b"], "x": pd.Series([None, 1], dtype=object)})
    assert validate_frame(one, ("nulls", [check])).passed


@pytest.mark.parametrize(("highest", "passed"), [(2, True), (1.9, False)])
def test_a23_the_quantile_expectation_gives_a_verdict_and_a_plain_bool(highest, passed):
    import great_expectations.expectations.core as gxe

    frame = pd.DataFrame({"row": list("abc"), "x": [1.0, 2.0, 9.0]})
    check = gxe.ExpectColumnQuantileValuesToBeBetween(
        column="x",
        quantile_ranges={"quantiles": [0.5], "value_ranges": [[1, highest]]},
        meta={"code": "median"},
    )
    verdict = validate_frame(frame, ("quantiles", [check]))
    assert verdict.passed is passed
    assert json.loads(json.dumps(verdict.to_json()))["checks"][0]["passed"] is passed


def test_a23_an_empty_suite_has_evaluated_nothing():
    assert validate_frame(dataset_frame(rows("p")), ("empty", [])).passed is False


def test_failing_rows_are_named_with_the_check_they_failed():
    frame = dataset_frame(rows("p", "x" * 101, "P ", "q"), frozenset(["q"]))
    verdict = gate(frame)
    assert {(f.row, f.code) for f in verdict.row_failures} == {
        ("n1", "prompt_too_long"),
        ("n0", "duplicate_prompt"),
        ("n2", "duplicate_prompt"),
        ("n3", "leak"),
    }


def test_an_unparseable_answer_is_named():
    verdict = gate(dataset_frame(rows("p", answer="very high")))
    assert codes(verdict) == {"unparseable_answer"}


def test_threads_get_verdicts_on_their_own_rows():
    def one(size):
        return size, gate(dataset_frame(rows(*map(str, range(size))))).evaluated_rows

    def observed(size):
        verdict = gate(dataset_frame(rows(*map(str, range(size)))), DatasetLimits(1000, 100))
        return verdict.checks[0].observed

    sizes = list(range(1, 13))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, sizes)) == [(size, size) for size in sizes]
        assert list(threads.map(observed, sizes)) == sizes


def test_the_frame_keeps_objects_as_they_are():
    frame = dataset_frame(rows("033"))
    assert tuple(frame.columns) == COLUMNS
    assert frame["prompt"].dtype == object
    assert isinstance(frame, pd.DataFrame)
