r"""Reads JSONL: lines end with `\n` or `\r\n` and with nothing else (A10).

Strings come out as they stand; numbers with a decimal point stay text until someone needs them, so
that `29.00` is not read as `29.0`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.data.errors import (
    DataFileMissingError,
    DataFileUnreadableError,
    TruncatedFileError,
)

_BOM = b"\xef\xbb\xbf"
_OTHER_FORMATS = {
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "gzip-compressed; unpack it first",
    b"PAR1": "Parquet; name it .parquet",
    b"PK\x03\x04": "a zip archive; unpack it first",
}


class DecimalText(str):
    """A JSON number with a fraction or exponent, kept as the text it was written in."""


@dataclass(frozen=True)
class Record:
    """One row of a file and the number of its line (JSONL) or row (Parquet), from 1."""

    line: int
    values: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line that is no row."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class FileContents:
    """What a file holds. `blank_lines` are the numbers of lines with nothing on them."""

    records: tuple[Record, ...]
    bad_lines: tuple[BadLine, ...] = ()
    blank_lines: tuple[int, ...] = ()


def read_jsonl(path: Path) -> FileContents:
    """Every row of a JSONL file; lines that do not parse are listed, not dropped.

    Raises:
        DataFileMissingError: there is no such file.
        DataFileUnreadableError: it is compressed, UTF-16 or another format.
        TruncatedFileError: the last line has no newline and does not parse.
    """
    if not path.is_file():
        raise DataFileMissingError(f"{path}: no such data file; check the path in data.source")
    data = path.read_bytes()
    for mark, advice in _OTHER_FORMATS.items():
        if data.startswith(mark):
            raise DataFileUnreadableError(f"{path} is {advice}")
    return parse_jsonl(data, str(path))


def parse_jsonl(data: bytes, name: str = "data") -> FileContents:
    """`read_jsonl` of bytes already in memory; `name` stands in error messages."""
    records: list[Record] = []
    bad: list[BadLine] = []
    blank: list[int] = []
    lines = data.removeprefix(_BOM).split(b"\n")
    for number, raw in enumerate(lines, start=1):
        line = raw.removesuffix(b"\r")
        last = number == len(lines)
        if not line.strip(b" \t\r"):
            if not last:
                blank.append(number)
            continue
        try:
            records.append(Record(number, parse_line(line)))
        except ValueError as error:
            if last:
                raise TruncatedFileError(
                    f"{name}, line {number}: the file ends inside this line ({error}); it was cut "
                    "off while being written or copied: fetch it again, or end the line"
                ) from error
            bad.append(BadLine(number, f"does not parse: {error}", line.decode("utf-8", "replace")))
    return FileContents(tuple(records), tuple(bad), tuple(blank))


def parse_line(line: bytes) -> dict[str, Any]:
    """The object on one line.

    Raises:
        ValueError: not UTF-8, not JSON, not an object, a repeated key, NaN, a lone surrogate.
    """
    try:
        value = json.loads(
            line.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=DecimalText,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, not {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
