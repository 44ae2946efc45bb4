"""Frames and Parquet keep strings byte for byte."""

import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.artifacts import write_jsonl
from tasks.data.errors import DataFileMissingError, DataFileUnreadableError
from tasks.data.jsonl import read_jsonl
from tasks.data.tables import read_parquet, to_frame, to_rows, write_parquet

TRICKY = [
    "033",
    "007",
    "18_19",
    "1e5",
    "NaN",
    "null",
    "True",
    "2024-01-02",
    "12345678901234567890",
    "",
    " 1 ",
    "\u2028",
    "0x10",
    "None",
    "-0",
    "é",
    "e\u0301",
]


def round_trip(rows, folder):
    source = write_jsonl(folder / "in.jsonl", rows)
    frame = to_frame([r.values for r in read_jsonl(source).records])
    parquet = write_parquet(folder / "rows.parquet", frame)
    back = to_frame([r.values for r in read_parquet(parquet).records])
    out = write_jsonl(folder / "out.jsonl", to_rows(back))
    return source.read_bytes(), out.read_bytes(), frame


def test_a09_strings_survive_jsonl_frame_parquet_jsonl(tmp_path):
    rows = [{"id": f"{i:04d}", "prompt": "p", "answer": text} for i, text in enumerate(TRICKY)]
    before, after, frame = round_trip(rows, tmp_path)
    assert before == after
    assert list(frame["answer"]) == TRICKY
    assert all(type(value) is str for value in frame["answer"])


def test_a09_parquet_columns_have_the_type_string(tmp_path):
    import pyarrow.parquet as pq

    path = write_parquet(tmp_path / "x.parquet", to_frame([{"id": "0007", "answer": "033"}]))
    assert {str(field.type) for field in pq.read_schema(path)} == {"string"}


def test_a09_a_null_does_not_turn_integers_into_floats(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", to_frame([{"n": 1}, {"n": None}]))
    values = [r.values["n"] for r in read_parquet(path).records]
    assert values == [1, None]
    assert type(values[0]) is int


@settings(max_examples=30, deadline=None)
@given(answers=st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_a09_any_string_survives(answers, tmp_path_factory):
    rows = [{"id": str(i), "answer": a} for i, a in enumerate(answers)]
    before, after, _ = round_trip(rows, tmp_path_factory.mktemp("trip"))
    assert before == after


def test_a_user_parquet_with_missing_numbers(tmp_path):
    path = tmp_path / "user.parquet"
    pd.DataFrame({"answer": [1.5, math.nan]}).to_parquet(path)
    values = [r.values["answer"] for r in read_parquet(path).records]
    assert values[0] == 1.5
    assert values[1] is None or math.isnan(values[1])


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(DataFileMissingError):
        read_parquet(tmp_path / "no.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataFileUnreadableError, match="no readable Parquet"):
        read_parquet(tmp_path / "bad.parquet")
