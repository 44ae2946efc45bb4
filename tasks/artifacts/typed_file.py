"""Records of a known type on disk: gzipped JSON that reads back as exactly what was written."""

import gzip
import zlib
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tasks.artifacts.atomic import write_atomic

T = TypeVar("T")
LEVEL = 3
"""Of gzip: nearly all the best level saves, in a fraction of its time."""


class TypedFileError(ValueError):
    """A file does not hold what its reader expects."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def write_typed(path: Path, kind: type[T], value: T) -> None:
    """Write a value of dataclasses, tuples and plain types; the same value gives the same bytes.

    NaN and infinities have no JSON: what holds one cannot be read back.
    """
    write_atomic(path, gzip.compress(_adapter(kind).dump_json(value), LEVEL, mtime=0))


def read_typed(path: Path, kind: type[T]) -> T:
    """Read a value back, of exactly the types it was written with.

    Raises:
        TypedFileError: the file is missing, cut off, changed, or of another version.
    """
    try:
        value: T = _adapter(kind).validate_json(gzip.decompress(path.read_bytes()), strict=True)
        return value
    except (OSError, EOFError, zlib.error, ValidationError) as error:
        raise TypedFileError(
            f"{path} cannot be read as {kind}: {error}; it is damaged, or another version of "
            "rl-pipeline wrote it"
        ) from error
