"""New prompts from a drop folder: what earlier nights have not seen, kept by its content.

An intake is a folder named by the hash of what it holds: every line ever taken in, oldest first,
and the held-out rows of the first night. Each night makes one from the intake of the last night
that trained and the files that lie in the drop folder; nothing is moved, deleted or marked, so a
night that is killed leaves nothing behind that the next one could trip over. Which rows are new is
decided by what they say, not by file name or time.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.artifacts import ArtifactRecord, hash_bytes, hash_file, hash_json, write_json
from tasks.artifacts.atomic import dump_json, write_jsonl
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.artifacts.folder import replace_folder
from tasks.data.candidate import json_safe
from tasks.data.errors import DataError
from tasks.data.jsonl import parse_line

logger = logging.getLogger(__name__)

KIND = "dataset"
STAGE = "intake"
FORMAT = 1
MANIFEST, ROWS, HELDOUT = "manifest.json", "rows.jsonl", "heldout.jsonl"
UNFINISHED_ENDINGS = (".tmp", ".part", ".partial", ".crdownload", ".swp")
_BOM = b"\xef\xbb\xbf"
_HEADS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip-compressed"}


class DropFolderError(DataError):
    """The drop folder cannot be read."""


class IntakeGoneError(ArtifactCorruptError):
    """The intake of the last night, which says what was seen, is gone or was changed."""


class DropLine(BaseModel):
    """One line as it stood in a dropped file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    """Hash of what the row says; the order of its keys and its blanks do not count."""
    file: str
    line: int
    text: str
    problem: str = ""
    """Why the line is no text at all; what JSON there is in it is judged when it is read."""


@dataclass(frozen=True)
class LeftFile:
    """A file that was not read, or only in part, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Intake:
    """What a night takes in."""

    record: ArtifactRecord | None
    """None where nothing was ever taken in and no held-out set is frozen."""
    new: int = 0
    """Lines no earlier night had seen; the gate has not looked at them yet."""
    left: tuple[LeftFile, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    """New lines by file."""


def row_key(text: str) -> str:
    """What makes two lines the same row: the same object, or the same text where it is no JSON."""
    try:
        return hash_json(json_safe(parse_line(text.encode())))
    except ValueError:
        return hash_bytes(text.encode())


def take_in(
    drop_folder: Path | None,
    store: Path,
    *,
    head: ArtifactRecord | None = None,
    heldout: Path | None = None,
) -> Intake:
    """The intake of this night.

    Args:
        drop_folder: where new files lie; None takes nothing in.
        store: `runs/store`.
        head: intake of the last night that trained; None before the first.
        heldout: held-out rows that are frozen from now on, where `head` has none yet.

    Raises:
        DropFolderError: there is no such folder, or it cannot be read.
        IntakeGoneError: `head` no longer holds what it held.
    """
    known = read_lines(head) if head is not None else []
    frozen = heldout_file(head) if head is not None else None
    freezes = frozen is None and heldout is not None
    left: list[LeftFile] = []
    seen = {line.key for line in known}
    new: list[DropLine] = []
    for line in _lines_in(drop_folder, left) if drop_folder is not None else ():
        if line.key not in seen:
            seen.add(line.key)
            new.append(line)
    counts = dict(Counter(line.file for line in new))
    if not new and not freezes:
        return Intake(head, 0, tuple(left))
    record = _write(store, known, new, frozen or heldout)
    return Intake(record, len(new), tuple(left), counts)


def _write(
    store: Path, known: Sequence[DropLine], new: Sequence[DropLine], heldout: Path | None
) -> ArtifactRecord:
    """Write the intake under its hash; one that is there already is left as it is."""
    lines = [*known, *new]
    rows = "".join(dump_json(line.model_dump()) + "\n" for line in lines)
    manifest = {
        "format": FORMAT,
        "rows_sha256": hash_bytes(rows.encode()),
        "rows": len(lines),
        "heldout_sha256": hash_file(heldout) if heldout is not None else None,
    }
    sha256 = hash_json(manifest)
    folder = store / STAGE / sha256[:16]
    record = ArtifactRecord(
        kind=KIND,
        uri=folder.as_posix(),
        sha256=sha256,
        meta={"rows": len(lines), "new": len(new), "heldout_sha256": manifest["heldout_sha256"]},
    )
    try:
        read_manifest(record)
    except IntakeGoneError:
        with replace_folder(folder) as fresh:
            write_jsonl(fresh / ROWS, (line.model_dump() for line in lines))
            if heldout is not None:
                (fresh / HELDOUT).write_bytes(heldout.read_bytes())
            write_json(fresh / MANIFEST, manifest)
    return record


def read_manifest(record: ArtifactRecord) -> dict[str, Any]:
    """The manifest of an intake whose every byte was checked.

    Raises:
        IntakeGoneError: something is gone or was changed.
    """
    manifest_path = record.path / MANIFEST
    try:
        manifest = parse_line(manifest_path.read_bytes())
        files = {ROWS: manifest["rows_sha256"], HELDOUT: manifest["heldout_sha256"]}
        wrong = [MANIFEST] if hash_json(manifest) != record.sha256 else []
        wrong += [n for n, sha in files.items() if sha and hash_file(record.path / n) != sha]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _gone(record, str(error)) from error
    if wrong:
        raise _gone(record, f"{', '.join(wrong)} changed")
    return manifest


def _gone(record: ArtifactRecord, why: str) -> IntakeGoneError:
    return IntakeGoneError(
        f"{record.path} no longer holds the intake {record.sha256[:12]} ({why}); it says which "
        "rows earlier nights have seen and which are held out: bring it back from a backup of "
        "runs/store, or rename the profile to begin a new chain of nights",
        record.path,
    )


def read_lines(record: ArtifactRecord) -> list[DropLine]:
    """Every line of an intake, oldest first.

    Raises:
        IntakeGoneError: the intake is not whole.
    """
    read_manifest(record)
    raw = (record.path / ROWS).read_bytes().split(b"\n")
    return [DropLine.model_validate_json(line) for line in raw if line]


def heldout_file(record: ArtifactRecord) -> Path | None:
    """The frozen held-out rows of an intake; None before the first night has trained."""
    return record.path / HELDOUT if read_manifest(record)["heldout_sha256"] else None


def _lines_in(folder: Path, left: list[LeftFile]) -> Iterator[DropLine]:
    """Lines of the folder's JSONL files by file name; what is not read is added to `left`."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DropFolderError(
            f"nightly.drop_folder={str(folder)!r}: {error.strerror or error}; make the folder, or "
            "give a path relative to the working directory"
        ) from error
    for entry in entries:
        reason = _why_not_ours(entry)
        if reason is None:
            yield from _lines_of(Path(entry.path), left)
        elif reason:
            left.append(LeftFile(entry.name, reason))


def _why_not_ours(entry: os.DirEntry[str]) -> str | None:
    """None for a file to read; empty for what is passed over in silence; else why it is left."""
    name = entry.name
    if name.startswith(".") or name.endswith(UNFINISHED_ENDINGS):
        return "" if name.startswith(".") else "its name says that it is still being written"
    if not entry.is_file():
        return "not a file; put JSONL files into the folder itself"
    return None if name.endswith((".jsonl", ".ndjson")) else "not named .jsonl"


def _lines_of(path: Path, left: list[LeftFile]) -> Iterator[DropLine]:
    """The finished lines of one file. A line without its newline waits for the next night."""
    try:
        before = path.stat()
        data = path.read_bytes()
        after = path.stat()
    except OSError as error:
        left.append(LeftFile(path.name, f"cannot be read: {error.strerror or error}"))
        return
    for head, what in _HEADS.items():
        if data.startswith(head):
            left.append(LeftFile(path.name, f"{what}; expected JSONL in UTF-8"))
            return
    if not data.strip():
        left.append(LeftFile(path.name, "empty"))
        return
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        left.append(LeftFile(path.name, "being written while it was read; next night"))
        return
    if not data.endswith(b"\n"):
        left.append(LeftFile(path.name, "no newline at its end, so half-written; next night"))
        return
    for number, raw in enumerate(data.removeprefix(_BOM).split(b"\n"), start=1):
        if raw.strip(b" \t\r"):
            yield _line(raw.removesuffix(b"\r"), path.name, number)


def _line(raw: bytes, file: str, number: int) -> DropLine:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        shown = raw.decode("utf-8", "backslashreplace")
        problem = f"not UTF-8 ({error.reason} at byte {error.start})"
        return DropLine(key=hash_bytes(raw), file=file, line=number, text=shown, problem=problem)
    return DropLine(key=row_key(text), file=file, line=number, text=text)


def by_file(lines: Sequence[DropLine]) -> dict[str, list[DropLine]]:
    """Lines grouped by the file they came in."""
    groups: dict[str, list[DropLine]] = {}
    for line in lines:
        groups.setdefault(line.file, []).append(line)
    return groups
