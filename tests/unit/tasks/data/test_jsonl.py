"""The JSONL reader: line ends, encodings, bad and cut-off lines."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.artifacts import write_jsonl
from tasks.data.errors import (
    DataFileMissingError,
    DataFileUnreadableError,
    TruncatedFileError,
)
from tasks.data.jsonl import DecimalText, parse_jsonl, read_jsonl

SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e"


@pytest.mark.parametrize("mark", list(SEPARATORS))
def test_a10_unicode_separators_do_not_end_a_line(mark):
    prompt = f"one{mark}two"
    raw = json.dumps({"prompt": prompt}, ensure_ascii=False).encode()
    escaped = json.dumps({"prompt": prompt}).encode()
    contents = parse_jsonl(b"\n".join([escaped, escaped, b""]))
    assert [r.values["prompt"] for r in contents.records] == [prompt, prompt]
    if mark in "\u2028\u2029\u0085":  # JSON allows these unescaped
        assert [r.values["prompt"] for r in parse_jsonl(raw).records] == [prompt]


def test_a10_crlf_bom_blank_lines_and_no_last_newline():
    contents = parse_jsonl(b'\xef\xbb\xbf{"a":"1"}\r\n\r\n  \n{"a":"2"}')
    assert [(r.line, r.values) for r in contents.records] == [(1, {"a": "1"}), (4, {"a": "2"})]
    assert contents.blank_lines == (2, 3)
    assert contents.bad_lines == ()


def test_a10_a_second_bom_is_not_stripped():
    contents = parse_jsonl(b"\xef\xbb\xbf\xef\xbb\xbf{}\n")
    assert [bad.line for bad in contents.bad_lines] == [1]


@pytest.mark.parametrize("tail", [b'{"a": "cut', b'{"a": 1', '{"a": "ü'.encode()[:-1], b"{"])
def test_a10_a_cut_off_last_line_is_an_error_that_names_it(tail):
    with pytest.raises(TruncatedFileError, match=r"rows\.jsonl, line 2: the file ends inside"):
        parse_jsonl(b'{"a": "1"}\n' + tail, "rows.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}", "Expecting property name"),
        (b'{"a": 1, "a": 2}', "a key is there twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"[1]", "not list"),
        (b'"text"', "not str"),
        (b"null", "not NoneType"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "x\ry"}', "control character"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": 1} {"b": 2}', "Extra data"),
    ],
)
def test_a_line_that_does_not_parse_is_listed_with_number_and_reason(line, reason):
    contents = parse_jsonl(b'{"a": "1"}\n' + line + b'\n{"a": "3"}\n')
    assert [r.line for r in contents.records] == [1, 3]
    assert [bad.line for bad in contents.bad_lines] == [2]
    assert reason in contents.bad_lines[0].reason


def test_decimals_keep_their_spelling_and_integers_their_digits():
    values = parse_jsonl(b'{"a": 29.00, "b": 1e400, "c": 12345678901234567890}').records[0].values
    assert (values["a"], type(values["a"])) == ("29.00", DecimalText)
    assert values["b"] == "1e400"
    assert values["c"] == 12345678901234567890


def test_missing_empty_and_foreign_files(tmp_path):
    with pytest.raises(DataFileMissingError, match=r"nowhere\.jsonl: no such data file"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert read_jsonl(tmp_path / "empty.jsonl").records == ()
    for name, data in {"a": b"\x1f\x8b..", "b": "{}".encode("utf-16"), "c": b"PAR1"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataFileUnreadableError):
            read_jsonl(tmp_path / name)


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(min_size=1, max_size=5),
            st.text(max_size=30) | st.integers() | st.none() | st.booleans(),
            max_size=4,
        ),
        max_size=6,
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_every_written_row_is_read_back(rows, newline, ascii_only, bom):
    lines = [json.dumps(row, ensure_ascii=ascii_only).encode("utf-8", "strict") for row in rows]
    data = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + newline for line in lines)
    contents = parse_jsonl(data)
    assert [record.values for record in contents.records] == rows
    assert contents.bad_lines == contents.blank_lines == ()


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_by_name(data):
    try:
        contents = parse_jsonl(data)
    except TruncatedFileError:
        return
    lines = [r.line for r in contents.records] + [b.line for b in contents.bad_lines]
    lines += contents.blank_lines
    whole = data.count(b"\n")
    assert sorted(lines)[:whole] == list(range(1, whole + 1))  # no line is dropped in silence


def test_what_the_project_writes_it_reads(tmp_path):
    rows = [{"id": "0007", "prompt": f"a{SEPARATORS}b", "answer": "033"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert [r.values for r in read_jsonl(path).records] == rows
