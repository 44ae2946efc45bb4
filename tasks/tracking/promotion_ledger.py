"""The promotion ledger: which release is the champion, and who made it so, when and why.

`runs/promotions/<model>.jsonl` is append-only and chained by hashes, so that a changed byte is
found and its line named; the head file beside it (`<model>.head.json`) names the last entry, so
that lines cut off the end are missed. Champion and previous follow from the entries alone;
MLflow's aliases only follow the ledger (`tasks.tracking.registry`). A line that a crash left
half-written was never acknowledged: it is put aside, in a file of its own, before the next append.
"""

import contextlib
import fcntl
import getpass
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tasks.artifacts import write_atomic, write_json
from tasks.artifacts.atomic import fsync_folder
from tasks.artifacts.errors import ArtifactWriteError
from tasks.tracking.promotion_entries import (
    FORMAT,
    GENESIS,
    Action,
    Entry,
    LedgerCorruptError,
    LedgerEntryError,
    LedgerError,
    LedgerFormatError,
    LedgerMovedError,
    LedgerState,
    LedgerTornError,
    Release,
    check_reason,
    corrupt,
    fold,
    line_of,
    model_name,
    parse_ledger,
    problem_of,
    seal,
)

__all__ = [
    "Action",
    "Entry",
    "LedgerCorruptError",
    "LedgerEntryError",
    "LedgerError",
    "LedgerFormatError",
    "LedgerMovedError",
    "LedgerState",
    "LedgerTornError",
    "PromotionLedger",
    "Release",
    "ledgers",
    "model_name",
    "this_actor",
]

FOLDER = "promotions"
logger = logging.getLogger(__name__)


def this_actor() -> str:
    """`user@host` of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's uid without a name
        user = f"uid{os.getuid()}"
    return f"{user}@{os.uname().nodename}"


class PromotionLedger:
    """The ledger of one registered model. Every reading verifies the whole chain."""

    def __init__(self, runs_dir: Path, model: str) -> None:
        self.model = model
        self.path = runs_dir / FOLDER / f"{model}.jsonl"
        self.head_path = self.path.with_name(f"{model}.head.json")

    def entries(self) -> list[Entry]:
        """All entries, oldest first; an unfinished last line counts as not written.

        Raises:
            LedgerError: the ledger cannot be relied on.
        """
        with self._opened(exclusive=False) as handle:
            return self._read(handle)[0]

    def state(self) -> LedgerState:
        """Champion, previous and what was said of each release."""
        return fold(self.entries())

    def champion(self) -> Release | None:
        """The release in service; None before the first promotion."""
        return self.state().champion

    def previous(self) -> Release | None:
        """Where a rollback leads."""
        return self.state().previous

    def verify(self) -> int:
        """Check every line and the head; returns how many entries there are.

        Raises:
            LedgerCorruptError: names the line.
            LedgerTornError: the last line is half-written.
            LedgerFormatError: another format.
        """
        with self._opened(exclusive=False) as handle:
            entries, tail = self._read(handle)
        if tail:
            line = len(entries) + 1
            raise LedgerTornError(
                f"{self.path}, line {line} is half-written (a crash while it was appended); the "
                "next run puts it aside, or rl-pipeline history --repair",
                str(self.path),
                line,
            )
        return len(entries)

    def recover(self) -> Path | None:
        """Put a half-written last line aside and bring the head up to date.

        Returns the file it was put into; None where there was none.
        """
        if not self.path.exists() and not self.head_path.exists():
            return None
        with self._opened(exclusive=True) as handle:
            return self._recovered(handle)[1]

    def append(
        self,
        action: Action,
        release: Release,
        *,
        reason: str,
        actor: str | None = None,
        evidence: Mapping[str, Any] | None = None,
        over: Release | Literal["any"] | None = "any",
    ) -> Entry:
        """Write one entry; when this returns it is on disk. A new release is given its version.

        `over` is the champion the decision was made against.

        Raises:
            LedgerEntryError: the action cannot follow, or the reason cannot be written.
            LedgerMovedError: `over` is not the champion any more.
            LedgerError: the ledger cannot be relied on.
            ArtifactWriteError: the disk refused; the ledger is as it was.
        """
        check_reason(reason)
        if release.model != self.model:
            raise LedgerEntryError(f"a release of {release.model} in the ledger of {self.model}")
        with self._opened(exclusive=True) as handle:
            entries, _ = self._recovered(handle)
            _check_profile(entries, release)
            state = fold(entries)
            if over != "any" and _sha(over) != _sha(state.champion):
                raise LedgerMovedError(
                    f"the champion of {self.model} is now {_name(state.champion)}, not "
                    f"{_name(over)} as when this was decided; do it again",
                    str(self.path),
                )
            version = state.versions.get(release.bundle_sha256) or len(state.latest) + 1
            numbered = release.model_copy(update={"version": version})
            if (problem := problem_of(state, action, numbered)) is not None:
                raise LedgerEntryError(f"{action}: {problem}", str(self.path))
            entry = seal(
                {
                    "format": FORMAT,
                    "sequence": len(entries) + 1,
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "actor": actor or this_actor(),
                    "action": action,
                    "release": numbered.model_dump(mode="json"),
                    "reason": reason,
                    "evidence": dict(evidence or {}),
                    "previous": entries[-1].hash if entries else GENESIS,
                }
            )
            self._write_line(handle, line_of(entry))
            self._write_head(entry)
        return entry

    @contextlib.contextmanager
    def _opened(self, *, exclusive: bool) -> Iterator[int | None]:
        """The file under its lock; None where there is none and nothing is to be written."""
        try:
            if exclusive:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
            else:
                handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            todo = "write" if exclusive else "read"
            raise ArtifactWriteError(
                f"cannot {todo} {self.path}: {error.strerror}; give this user the right to it "
                f"(ls -l {self.path.parent})",
                self.path,
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield handle
        finally:
            os.close(handle)

    def _read(self, handle: int | None) -> tuple[list[Entry], bytes]:
        """Entries and unfinished tail, held against the head."""
        data = b"" if handle is None else _read_all(handle)
        entries, tail = parse_ledger(data, str(self.path))
        if tail:
            logger.warning("%s ends in half a line; it counts as not written", self.path)
        head = self._head()
        if head is not None:
            sequence, sha256 = head
            if sequence > len(entries):
                raise corrupt(str(self.path), len(entries) + 1, "is missing or cut short")
            if sequence < 1 or entries[sequence - 1].hash != sha256:
                raise corrupt(str(self.path), sequence, f"is not the one {self.head_path} names")
        return entries, tail

    def _recovered(self, handle: int | None) -> tuple[list[Entry], Path | None]:
        """Entries of a ledger without unfinished tail; the tail lies in a file of its own."""
        entries, tail = self._read(handle)
        aside = None
        if tail and handle is not None:
            aside = self.path.with_name(f"{self.path.name}.torn-{time.time_ns()}")
            write_atomic(aside, tail)
            os.ftruncate(handle, os.fstat(handle).st_size - len(tail))
            os.fsync(handle)
            logger.warning("half a line of %s, left by a crash, was put into %s", self.path, aside)
        head = self._head()
        if entries and (head is None or head[0] < len(entries)):
            self._write_head(entries[-1])
        return entries, aside

    def _write_line(self, handle: int | None, line: str) -> None:
        assert handle is not None  # opened for writing
        size = os.fstat(handle).st_size
        data = f"{line}\n".encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(handle, data[written:])
            os.fsync(handle)
            fsync_folder(self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, size)
            raise ArtifactWriteError(
                f"could not append to {self.path}: {error.strerror}; nothing was decided. Free "
                "some space and do it again",
                self.path,
            ) from error

    def _head(self) -> tuple[int, str] | None:
        """Sequence and hash of the last acknowledged entry; None where no head was written yet."""
        try:
            body = json.loads(self.head_path.read_bytes())
            return int(body["sequence"]), str(body["hash"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise LedgerCorruptError(
                f"{self.head_path} is unreadable; if every line of {self.path} is as it should be, "
                f"delete it: rm {self.head_path}",
                str(self.head_path),
            ) from None

    def _write_head(self, entry: Entry) -> None:
        write_json(self.head_path, {"sequence": entry.sequence, "hash": entry.hash})


def ledgers(runs_dir: Path) -> list[PromotionLedger]:
    """The ledger of every model there is, by name."""
    found = sorted((runs_dir / FOLDER).glob("*.jsonl"))
    return [PromotionLedger(runs_dir, path.stem) for path in found]


def _read_all(handle: int) -> bytes:
    chunks, position = [], 0
    while chunk := os.pread(handle, 1 << 20, position):
        chunks.append(chunk)
        position += len(chunk)
    return b"".join(chunks)


def _check_profile(entries: list[Entry], release: Release) -> None:
    """Two profiles whose names differ in dots and dashes only must not share a champion."""
    owner = entries[-1].release.profile if entries else release.profile
    if owner != release.profile:
        raise LedgerEntryError(
            f"profile {release.profile} and profile {owner} would share the model {release.model}; "
            "rename one of them"
        )


def _sha(release: Release | None) -> str | None:
    return None if release is None else release.bundle_sha256


def _name(release: Release | None) -> str:
    return "nobody" if release is None else release.name
