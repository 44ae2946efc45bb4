"""Typed records on disk: what comes back is what went in, or a named error."""

import gzip
import json
import pickle
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.artifacts.typed_file import TypedFileError, read_typed, write_typed


class Version(NamedTuple):
    attempt: int
    step: int


class Kind(Enum):
    ONE = "one"


@dataclass(frozen=True)
class Inner:
    numbers: tuple[float, ...]
    version: Version
    kind: Kind
    score: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: tuple[Inner, ...]
    table: dict[str, float]


VALUE = Outer(
    "ünïcode \u2028 \x00", (Inner((0.1, -1e-30, 3.0), Version(1, 2), Kind.ONE),), {"a": 1.5}
)


def test_what_was_written_comes_back_with_its_types(tmp_path):
    path = tmp_path / "deep" / "x.json.gz"
    write_typed(path, Outer, VALUE)
    back = read_typed(path, Outer)
    assert back == VALUE and type(back.inner[0].version) is Version
    assert back.inner[0].kind is Kind.ONE and back.inner[0].score is None
    first = path.read_bytes()
    write_typed(path, Outer, VALUE)
    assert path.read_bytes() == first
    assert json.loads(gzip.decompress(first))["inner"][0]["version"] == [1, 2]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_floats_come_back_to_the_bit(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("floats") / "x.gz"
    write_typed(path, tuple[float, ...], tuple(numbers))
    assert [x.hex() for x in read_typed(path, tuple[float, ...])] == [x.hex() for x in numbers]


def test_nothing_is_something(tmp_path):
    write_typed(tmp_path / "x.gz", tuple[Outer, ...], ())
    assert read_typed(tmp_path / "x.gz", tuple[Outer, ...]) == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"{}",
        lambda b: gzip.compress(b"{"),
        lambda b: gzip.compress(b"[]"),
        lambda b: gzip.compress(gzip.decompress(b).replace(b"1.5", b'"1.5"')),
        lambda b: gzip.compress(gzip.decompress(b).replace(b"1.5", b"null")),
        lambda b: gzip.compress(gzip.decompress(b).replace(b'"one"', b'"two"')),
        lambda b: bytes([*b[:20], b[20] ^ 1, *b[21:]]),
    ],
)
def test_what_is_not_as_it_was_is_named(tmp_path, damage):
    path = tmp_path / "x.gz"
    write_typed(path, Outer, VALUE)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TypedFileError, match=r"x\.gz cannot be read as"):
        read_typed(path, Outer)


def test_a_missing_file_and_a_nan_are_named(tmp_path):
    with pytest.raises(TypedFileError, match="No such file"):
        read_typed(tmp_path / "none.gz", Outer)
    write_typed(tmp_path / "nan.gz", tuple[float, ...], (float("nan"),))
    with pytest.raises(TypedFileError) as caught:
        read_typed(tmp_path / "nan.gz", tuple[float, ...])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
