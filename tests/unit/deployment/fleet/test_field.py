"""The field loop: what leaves a device, what can train, what a person must see."""

import json
import os

import pytest

from deployment.fleet.books import DeviceBooks
from deployment.fleet.collect import ReviewFileError, accept, collect
from deployment.fleet.field import (
    MAX_PROMPT_CHARS,
    accepted,
    clean_text,
    known_answer,
    question_of,
    row_id,
    sort_rows,
)
from deployment.fleet.on_device import field_rows
from deployment.fleet.on_device.places import Places
from tests.flows.loopback_devices import write_field_log


def _row(prompt="34*7-52=?", **other):
    messages = [{"role": "user", "content": prompt}]
    values = {"messages": messages, "answer": "1", "opted_in": True, "error": None}
    return {"time": 1.0, "latency_s": 0.1, "release": "a" * 64, **values, **other}


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("34*7-52=?", "186"),
        (" 1 + 2 = ? ", "3"),
        ("(2-5)*3=?", "-9"),
        ("7=?", "7"),
        ("1/2=?", None),
        ("2**99=?", None),
        ("1+=?", None),
        ("1+1", None),
        ("what is 1+1=?", None),
        ("__import__('os')=?", None),
        ("", None),
        ("9" * 300 + "=?", None),
    ],
)
def test_answers_that_follow_from_the_prompt(prompt, answer):
    assert known_answer(prompt) == answer


def test_text_from_the_field_is_made_harmless():
    specials = ["<|im_start|>", "<|im_end|>"]
    assert clean_text("a\x1b[31m\x00b\u202ec\u200bd\ufeff", specials, 99) == "a[31mbcd"
    assert clean_text("<|im_start|>system", specials, 99) == "<\u200b|im_start|>system"
    # taking the invisible out first: nothing hides inside a special string
    assert "<|im_end|>" not in clean_text("<|im\u200b_end|>", specials, 99)
    assert clean_text("x" * 9, [], 4) == "xxxx"
    assert clean_text("line\nline\ttab", [], 99) == "line\nline\ttab"
    assert clean_text("e\u0301", [], 9) == "\u00e9"
    assert clean_text("\ud800", [], 9) == ""


def test_only_a_single_question_is_one():
    assert question_of({"prompt": "a"}) == "a"
    assert question_of(_row("a")) == "a"
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert question_of({"messages": system}) == "u"
    two = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    for messages in (None, [], "x", ["x"], two, [*system, *system], [{"role": "user"}]):
        assert question_of({"messages": messages}) is None


def test_a_models_own_answer_never_trains():
    rows = [_row(answer="187"), _row("how are you?", answer="fine", error="timeout")]
    found = sort_rows(rows, "one", [], set())
    (training,) = found.training
    assert (training["prompt"], training["answer"]) == ("34*7-52=?", "186")
    assert training["origin"] == {"device": "one", "release": "a" * 64}
    (review,) = found.review
    assert (review["answer"], review["model_answer"], review["failed"]) == (None, "fine", True)
    assert found.counts == {"can train": 1, "to review": 1}


@pytest.mark.parametrize("opted_in", [False, None, 1, "true", "yes"])
def test_nothing_but_true_is_opting_in(opted_in):
    found = sort_rows([_row(opted_in=opted_in)], "one", [], set())
    assert (found.training, found.review, found.counts) == ([], [], {"private": 1})


def test_once_only_whatever_case_and_spacing():
    rows = [_row("1+1=?"), _row(" 1+1=? "), _row("Hello  there"), _row("hello there")]
    found = sort_rows(rows, "one", [], set())
    assert (len(found.training), len(found.review), found.counts["seen before"]) == (1, 1, 2)
    again = sort_rows(rows, "two", [], {row_id("1+1=?"), row_id("hello there")})
    assert (again.training, again.review, again.counts) == ([], [], {"seen before": 4})


def test_odd_rows_do_not_stop_it():
    rows = [{}, _row(None), _row(""), _row("\u200b"), _row("x" * 9999), _row(answer=7, release=3)]
    found = sort_rows(rows, "one", [], set())
    assert found.counts == {"private": 1, "no single question": 3, "to review": 1, "can train": 1}
    assert len(found.review[0]["prompt"]) == MAX_PROMPT_CHARS
    assert found.training[0]["origin"]["release"] is None


def test_only_answered_rows_of_a_review_file_are_taken():
    rows = [
        {"prompt": "a", "answer": " right\x00 ", "origin": {"device": "one"}},
        {"prompt": "b", "answer": None},
        {"prompt": "c", "answer": "  "},
        {"prompt": "d", "answer": 4},
        {"answer": "x"},
    ]
    (row,) = accepted(rows)
    assert (row["prompt"], row["answer"], row["id"]) == ("a", "right", row_id("a"))


def test_on_the_device_only_opted_in_rows_and_only_so_many(tmp_path):
    rows = [_row(f"{n}+1=?", opted_in=n % 2 == 0) for n in range(10)]
    write_field_log(tmp_path, rows, tail=b'{"opted_in": true, "messag')
    places = Places(str(tmp_path), "agent")
    found = field_rows.opted_in(places, 3, 1 << 20)
    assert [r["messages"][0]["content"] for r in found["rows"]] == ["0+1=?", "2+1=?", "4+1=?"]
    assert (found["private"], found["unreadable"], found["left_out"]) == (5, 1, 2)
    assert len(field_rows.opted_in(places, 99, 250)["rows"]) == 1
    big = [_row("x" * field_rows.MAX_LINE_BYTES), _row()]
    write_field_log(tmp_path / "b", big)
    found = field_rows.opted_in(Places(str(tmp_path / "b"), "agent"), 9, 1 << 20)
    assert (len(found["rows"]), found["unreadable"]) == (1, 1)
    (tmp_path / "c").mkdir()
    empty = field_rows.opted_in(Places(str(tmp_path / "c"), "agent"), 9, 9)
    assert empty == {"rows": [], "private": 0, "unreadable": 0, "left_out": 0}


@pytest.mark.needs("sshd")
def test_collect_over_a_real_sshd_twice_is_once(device, known_hosts, tmp_path):
    rows = [_row(), _row("who are you?", answer="<|im_end|>"), _row("2+2=?", opted_in=False)]
    folder = write_field_log(device.root, rows)
    runs, drop = tmp_path / "runs", tmp_path / "drop"
    away = device.config(name="two", port=1)
    os.symlink(known_hosts, tmp_path / "known")
    try:
        first = collect([device.config(), away], tmp_path / "known", runs, drop, max_rows=99)
        again = collect([device.config()], tmp_path / "known", runs, drop, max_rows=99)
    finally:
        for path in folder.iterdir():
            path.unlink()
    assert first.counts == {"one": {"can train": 1, "to review": 1, "private": 1}}
    assert list(first.failed) == ["two"] and "nothing listens" in first.failed["two"]
    (line,) = first.training.read_text().splitlines()
    assert json.loads(line)["answer"] == "186"
    assert first.training.parent == drop and first.training.suffix == ".jsonl"
    assert "2+2" not in first.review.read_text()
    assert (again.training, again.review) == (None, None)
    assert again.counts == {"one": {"seen before": 2, "private": 1}}

    review = json.loads(first.review.read_text())
    assert accept(first.review, drop) == (None, 0, 1)
    first.review.write_text(json.dumps({**review, "answer": "an agent"}) + "\n")
    path, taken, left = accept(first.review, drop)
    assert (taken, left) == (1, 0)
    assert json.loads(path.read_text())["answer"] == "an agent"
    first.review.write_text("{\n")
    with pytest.raises(ReviewFileError, match="line 1 is no JSON"):
        accept(first.review, drop)
    with pytest.raises(ReviewFileError, match="no such file"):
        accept(tmp_path / "none", drop)
    assert DeviceBooks(runs).record("one") is None
