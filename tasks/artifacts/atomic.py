"""Atomic writes: temporary file beside the target, fsync, rename, fsync of the folder."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.artifacts.errors import ArtifactWriteError


def write_atomic(path: Path, data: bytes | str, *, lasting: bool = True) -> Path:
    """Put `data` at `path`; a reader sees the old file or the whole new one, never a part.

    Not `lasting`, it is not waited for until the disk has it: for what nobody reads after a power
    cut.

    Raises:
        ArtifactWriteError: the disk refused; nothing of the new file is left.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        if lasting:
            fsync_folder(path.parent)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise ArtifactWriteError(
            f"could not write {path}: {error.strerror or error}; free some space or choose "
            "another run folder, then run again: finished stages are reused",
            path,
        ) from error
    return path


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """JSON with sorted keys, UTF-8, and no NaN."""
    separators = (",", ":") if indent is None else None
    return json.dumps(
        value,
        sort_keys=True,
        ensure_ascii=False,
        allow_nan=False,
        indent=indent,
        separators=separators,
    )


def write_json(path: Path, value: Any, *, lasting: bool = True) -> Path:
    """Write `value` as readable JSON, atomically; see `write_atomic`."""
    return write_atomic(path, dump_json(value, indent=2) + "\n", lasting=lasting)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one JSON object per line, atomically."""
    return write_atomic(path, "".join(dump_json(row) + "\n" for row in rows))
