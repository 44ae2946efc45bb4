"""Rows as pandas frames and Parquet files, with every string kept byte for byte (A09)."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts import write_atomic
from tasks.data.errors import DataFileMissingError, DataFileUnreadableError
from tasks.data.jsonl import FileContents, Record

if TYPE_CHECKING:
    import pandas as pd


def to_frame(rows: Sequence[dict[str, Any]]) -> "pd.DataFrame":
    """A frame of Python objects: no column is coerced to numbers, dates or booleans."""
    import pandas as pd

    columns = list(dict.fromkeys(key for row in rows for key in row))
    return pd.DataFrame(
        {
            name: pd.Series([row.get(name) for row in rows], dtype=object, name=name)
            for name in columns
        },
        columns=columns,
    )


def to_rows(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """The rows of a frame that `to_frame` made."""
    names = list(frame.columns)
    columns = [frame[name].tolist() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def write_parquet(path: Path, frame: "pd.DataFrame") -> Path:
    """Write a frame atomically; a column of strings (and nulls) gets the type string."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(frame.columns)
    arrays = [_array(frame[name].tolist()) for name in names]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, names=names), buffer)
    return write_atomic(path, buffer.getvalue())


def _array(values: list[Any]) -> Any:
    import pyarrow as pa

    textual = all(value is None or isinstance(value, str) for value in values)
    return pa.array(values, type=pa.string()) if textual else pa.array(values)


def read_parquet(path: Path) -> FileContents:
    """Every row of a Parquet file, as Python values: an integer column with nulls stays integers.

    Raises:
        DataFileMissingError: there is no such file.
        DataFileUnreadableError: it is no Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataFileMissingError(f"{path}: no such data file; check the path in data.source")
    try:
        # through a buffer: a name such as `x=1/data.parquet` must not add partition columns
        table = pq.read_table(io.BytesIO(path.read_bytes()))
    except pa.ArrowInvalid as error:
        raise DataFileUnreadableError(f"{path} is no readable Parquet file: {error}") from error
    return FileContents(tuple(Record(i, row) for i, row in enumerate(table.to_pylist(), start=1)))
