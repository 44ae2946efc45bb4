"""Append-only JSON lines that survive kills: one locked write and fsync a line, no rewriting.

A line cut off by a kill stays where it is; the next append starts on a line of its own, and a
reader is told which lines it could not read.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.atomic import dump_json, fsync_folder
from tasks.artifacts.errors import ArtifactWriteError


@dataclass(frozen=True)
class LogLines:
    """What a log holds: its objects in order, and the numbers (from 1) of unreadable lines."""

    rows: tuple[dict[str, Any], ...] = ()
    unreadable: tuple[int, ...] = ()


def read_log(path: Path) -> LogLines:
    """All lines of a log; a missing file is an empty log."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return LogLines()
    return parse_log(raw)


def parse_log(raw: bytes) -> LogLines:
    """The lines in `raw`; blank ones count for nothing."""
    rows, unreadable = [], []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:  # a cut UTF-8 sequence is one too
            value = None
        if isinstance(value, dict):
            rows.append(value)
        else:
            unreadable.append(number)
    return LogLines(tuple(rows), tuple(unreadable))


class AppendLog:
    """One writer's hold on a log, got from `locked_log`; others wait until it is let go."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def lines(self) -> LogLines:
        """What the log holds now."""
        size = os.fstat(self._handle).st_size
        return parse_log(os.pread(self._handle, size, 0))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one line; it is on the disk when this returns."""
        size = os.fstat(self._handle).st_size
        torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        line = ("\n" if torn else "") + dump_json(dict(row)) + "\n"
        rest = line.encode()
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        os.fsync(self._handle)


@contextlib.contextmanager
def locked_log(path: Path) -> Iterator[AppendLog]:
    """Hold the log at `path`, making it where there is none.

    Raises:
        ArtifactWriteError: it cannot be opened or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if new:
                fsync_folder(path.parent)
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield AppendLog(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise ArtifactWriteError(
            f"could not write {path}: {error.strerror or error}; make it writable or free some "
            "space",
            path,
        ) from error
