"""What stands in the promotion ledger: releases, entries, and the state that follows from them.

Pure: no file is opened here. An entry is one line of canonical JSON that carries the hash of the
entry before it and its own; state is a fold over the entries.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.artifacts import ArtifactRecord, hash_json
from tasks.artifacts.atomic import dump_json

Action = Literal["promote", "rollback", "reject", "approve", "candidate"]

FORMAT = 1
GENESIS = "0" * 64
"""The `previous` hash of the first entry."""
MAX_REASON_CHARS = 2000


class LedgerError(ValueError):
    """Base of what can be wrong with a ledger or an entry; `path` and `line` say where."""

    def __init__(self, message: str, path: str = "", line: int = 0) -> None:
        super().__init__(message, path, line)
        self.message, self.path, self.line = message, path, line

    def __str__(self) -> str:
        return self.message


class LedgerCorruptError(LedgerError):
    """A line was changed, taken out, put in or cut off; nothing is concluded from the ledger."""


class LedgerTornError(LedgerError):
    """The last line is half-written: a crash, not yet put aside."""


class LedgerFormatError(LedgerError):
    """The ledger was written in another format than this code reads."""


class LedgerEntryError(LedgerError):
    """This entry cannot follow the ones there are."""


class LedgerMovedError(LedgerError):
    """Somebody else moved the champion between the look and the entry."""


class Release(BaseModel):
    """One packaged bundle and everything it was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    profile: str
    run_id: str
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the bundle's manifest."""
    bundle: str
    """Path of the bundle folder, as the run wrote it."""
    records: dict[str, ArtifactRecord] = {}
    """What each stage made, by stage."""
    version: int = Field(0, ge=0)
    """1, 2, … in the order candidates came; 0 until the ledger has given it one."""

    @property
    def name(self) -> str:
        """For people: model and version."""
        return f"{self.model} v{self.version}"


class Entry(BaseModel):
    """One line of the ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    sequence: int
    """1, 2, …; the line's number."""
    time: str
    """UTC, ISO 8601."""
    actor: str
    """`user@host`."""
    action: Action
    release: Release
    """Whom it is about; of a rollback, the release returned to."""
    reason: str
    evidence: dict[str, Any] = {}
    """Figures the decision rests on; finite numbers or null only."""
    previous: str
    """Hash of the entry before."""
    hash: str
    """Of this entry without this field."""


@dataclass(frozen=True)
class LedgerState:
    """What follows from the entries so far."""

    champion: Release | None = None
    previous: Release | None = None
    """Where a rollback leads; None after one, or while there was only one champion."""
    latest: Mapping[str, Entry] = field(default_factory=dict)
    """The newest entry about each bundle, by its sha256."""
    withdrawn: frozenset[str] = frozenset()
    """Bundles a person rolled back or rejected, and nobody has promoted again."""
    served: frozenset[str] = frozenset()
    """Bundles that were champion at some time."""

    @property
    def versions(self) -> dict[str, int]:
        """The version each bundle was given, by its sha256."""
        return {sha256: entry.release.version for sha256, entry in self.latest.items()}

    @property
    def releases(self) -> list[Release]:
        """Every release, oldest version first."""
        return sorted((e.release for e in self.latest.values()), key=lambda r: r.version)


def model_name(profile: str) -> str:
    """The registered model of a profile; MLflow and file names take no dots."""
    return profile.replace(".", "-")


def problem_of(state: LedgerState, action: Action, release: Release) -> str | None:
    """Why `action` on `release` cannot come next; None where it can."""
    champion, sha256 = state.champion, release.bundle_sha256
    known = state.versions.get(sha256)
    wanted = known or len(state.latest) + 1
    if release.version != wanted:
        return f"{release.name} should be version {wanted}"
    is_champion = champion is not None and champion.bundle_sha256 == sha256
    if action in ("promote", "approve", "candidate", "reject") and is_champion:
        return f"{release.name} is the champion already"
    if action != "rollback":
        return None
    if state.previous is None:
        return (
            "there is no previous release to go back to (one rollback was made already, or there "
            "was only one champion); choose a version from `rl-pipeline history` and "
            "`rl-pipeline promote` it"
        )
    if state.previous.bundle_sha256 != sha256:
        return f"a rollback leads to {state.previous.name}, not to {release.name}"
    return None


def after(state: LedgerState, entry: Entry) -> LedgerState:
    """The state once `entry` is written.

    Raises:
        LedgerEntryError: it cannot follow.
    """
    release = entry.release
    if (problem := problem_of(state, entry.action, release)) is not None:
        raise LedgerEntryError(f"{entry.action}: {problem}", line=entry.sequence)
    sha256 = release.bundle_sha256
    champion, previous, withdrawn = state.champion, state.previous, set(state.withdrawn)
    if entry.action in ("promote", "approve"):
        champion, previous = release, champion
        withdrawn.discard(sha256)
    elif entry.action == "rollback":
        if champion is not None:
            withdrawn.add(champion.bundle_sha256)
        champion, previous = release, None
        withdrawn.discard(sha256)
    elif entry.action == "reject":
        withdrawn.add(sha256)
    served = state.served | ({champion.bundle_sha256} if champion is not None else set())
    latest = {**state.latest, sha256: entry}
    return LedgerState(champion, previous, latest, frozenset(withdrawn), served)


def fold(entries: Iterable[Entry]) -> LedgerState:
    """The state after all entries, in order."""
    state = LedgerState()
    for entry in entries:
        state = after(state, entry)
    return state


def seal(body: Mapping[str, Any]) -> Entry:
    """An entry with its hash.

    Raises:
        LedgerEntryError: something in it cannot be written as JSON (NaN, infinity, bad Unicode).
    """
    try:
        return Entry.model_validate({**body, "hash": hash_json(dict(body))})
    except ValueError as error:
        raise LedgerEntryError(f"an entry that cannot be written: {error}") from error


def line_of(entry: Entry) -> str:
    """The line as it is written, without its newline."""
    return dump_json(entry.model_dump(mode="json"))


def parse_ledger(data: bytes, path: str) -> tuple[list[Entry], bytes]:
    """The whole lines as entries, chain and order checked, and the unfinished last line.

    Raises:
        LedgerFormatError: a line of another format.
        LedgerCorruptError: a line that is not what was written; named.
    """
    *lines, tail = data.split(b"\n")
    entries: list[Entry] = []
    state = LedgerState()
    for number, line in enumerate(lines, 1):
        entry = _parse_line(line, number, path)
        expected = entries[-1].hash if entries else GENESIS
        if entry.previous != expected or entry.sequence != number:
            raise corrupt(path, number, "does not follow the line before it")
        try:
            state = after(state, entry)
        except LedgerEntryError as error:
            raise corrupt(path, number, str(error)) from None
        entries.append(entry)
    return entries, tail


def _parse_line(line: bytes, number: int, path: str) -> Entry:
    """One line, held against its own hash and its canonical form."""
    try:
        body = json.loads(line)
        found = body["format"] if isinstance(body, dict) and "format" in body else None
        if isinstance(body, dict) and found != FORMAT and body.get("hash") == _own_hash(body):
            raise _other_format(path, number, found)
        entry = Entry.model_validate(body)
        whole = dump_json(body).encode() == line and _own_hash(body) == entry.hash
    except LedgerFormatError:
        raise
    except (ValidationError, ValueError, RecursionError):
        if _looks_old(line):
            raise _other_format(path, number, "none") from None
        raise corrupt(path, number, "is not an entry") from None
    if not whole:
        raise corrupt(path, number, "differs from what was written")
    return entry


def _own_hash(body: Mapping[str, Any]) -> str:
    return hash_json({name: value for name, value in body.items() if name != "hash"})


def _looks_old(line: bytes) -> bool:
    """A JSON object that knows neither format nor hash: not ours gone bad, but another kind."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and not {"format", "hash", "sequence"} & body.keys()


def _other_format(path: str, number: int, found: object) -> LedgerFormatError:
    newer = isinstance(found, int) and found > FORMAT
    todo = (
        "it was written by a newer version of this program: use that one"
        if newer
        else f"keep it as {path}.old (mv {path} {path}.old), then make its champion known again: "
        "rl-pipeline promote RUN --force --reason 'adopted from the old ledger'"
    )
    return LedgerFormatError(
        f"{path}, line {number}: format {found}, this program reads format {FORMAT}; {todo}",
        path,
        number,
    )


def corrupt(path: str, number: int, what: str) -> LedgerCorruptError:
    """The error that names a line."""
    return LedgerCorruptError(
        f"{path}, line {number} {what}; nothing is promoted, rolled back or deployed from it. "
        "Restore the file and its head from a backup (MLflow's model versions carry the entries' "
        f"hashes as `ledger.hash`), or move both aside and promote anew: mv {path} {path}.bad",
        path,
        number,
    )


def check_reason(reason: str) -> None:
    """Refuse a reason that says nothing or cannot be written.

    Raises:
        LedgerEntryError: blank, too long, or not Unicode.
    """
    if not reason.strip() or len(reason) > MAX_REASON_CHARS:
        raise LedgerEntryError(
            f"a reason of {len(reason)} characters; expected 1 to {MAX_REASON_CHARS}, not blank"
        )
    try:
        reason.encode()
    except UnicodeEncodeError:
        raise LedgerEntryError("the reason is not valid Unicode; write it in UTF-8") from None
