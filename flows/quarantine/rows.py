"""The quarantine across runs: which rows were set aside, why, from where, and what was decided."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.quarantine.decisions import Decision, ReleaseRefusedError, decide, read_decisions
from tasks.artifacts import hash_json
from tasks.artifacts.append_log import read_log
from tasks.gates.releases import fold_decisions, row_hash, why_bound

HANDLE = 10
"""Hex digits of a row's handle."""


class UnknownRowError(LookupError):
    """No quarantined row, or more than one, goes by this handle or id."""


@dataclass(frozen=True)
class Held:
    """One row that one check set aside, wherever it was seen."""

    handle: str
    """What to call it: from its content and the check."""
    row_sha256: str
    code: str
    reason: str
    row_id: str | None
    source: str
    line: int | None
    split: str
    row: dict[str, Any]
    outputs: tuple[str, ...]
    """Folders of data prep that set it aside, newest last."""
    runs: tuple[str, ...]
    """Runs that used one of them."""
    released: bool = False
    decisions: tuple[Mapping[str, Any], ...] = field(default=())
    """Decisions on this row and check, oldest first."""

    @property
    def bound(self) -> str | None:
        """Why it cannot be released; None where it can."""
        return why_bound(self.code, self.reason)

    @property
    def where(self) -> str:
        """File and line, as far as known."""
        place = self.source or "?"
        return f"{place}:{self.line}" if self.line is not None else place


def quarantined(runs: Path) -> tuple[list[Held], list[str]]:
    """Every quarantined row of a runs folder, newest data prep first; and what was unreadable.

    Raises:
        ReleaseFileError: the decision file cannot be relied on.
    """
    files = sorted((runs / "store" / "data").glob("*/quarantine.jsonl"), key=_age)
    decisions = read_decisions(runs)
    users = _users(runs)
    found: dict[str, Held] = {}
    problems = []
    for path in files:
        lines = read_log(path)
        if lines.unreadable:
            problems.append(f"{path}: line {lines.unreadable[0]} cannot be read")
        for line in lines.rows:
            held = _held(line, path.parent.as_posix(), users, decisions, found)
            found[held.handle] = held
    age = {path.parent.as_posix(): number for number, path in enumerate(files)}
    return sorted(found.values(), key=lambda held: -age[held.outputs[-1]]), problems


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _held(
    line: Mapping[str, Any],
    output: str,
    users: Mapping[str, Sequence[str]],
    decisions: Sequence[Mapping[str, Any]],
    found: dict[str, Held],
) -> Held:
    """The line's row; one seen before is taken out of `found`, so that it counts as newest."""
    reason, row = str(line.get("reason", "")), line.get("row")
    row = row if isinstance(row, dict) else {}
    code, sha256 = reason.partition(":")[0], row_hash(row)
    handle = hash_json([sha256, code])[:HANDLE]
    before = found.pop(handle, None)
    about = tuple(d for d in decisions if (d["row_sha256"], d["code"]) == (sha256, code))
    outputs = tuple(dict.fromkeys((*(before.outputs if before else ()), output)))
    runs = tuple(dict.fromkeys(run for name in outputs for run in users.get(name, ())))
    number = line.get("line")
    return Held(
        handle=handle,
        row_sha256=sha256,
        code=code,
        reason=reason,
        row_id=None if line.get("row_id") is None else str(line["row_id"]),
        source=str(line.get("source") or ""),
        line=number if isinstance(number, int) else None,
        split=str(line.get("split") or ""),
        row=row,
        outputs=outputs,
        runs=runs,
        released=code in fold_decisions(about).by_row.get(sha256, frozenset()),
        decisions=about,
    )


def _users(runs: Path) -> dict[str, list[str]]:
    """Runs by the data folder they used."""
    users: dict[str, list[str]] = {}
    for path in sorted(runs.glob("*/records.json")):
        if path.parent.is_symlink():
            continue
        try:
            uri = json.loads(path.read_bytes())["data"]["uri"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a run that ended before data prep, or is being written
        name = (runs / "store" / "data" / Path(str(uri)).name).as_posix()
        users.setdefault(name, []).append(path.parent.name)
    return users


def find(rows: Sequence[Held], named: str) -> Held:
    """The row a person named by handle, the beginning of one, or row id.

    Raises:
        UnknownRowError: none, or several, go by it.
    """
    exact = [held for held in rows if held.handle == named]
    by_id = [held for held in rows if held.row_id == named]
    # released from one check, a row may be held by the next: what it is held by now counts
    by_id = [held for held in by_id if held.outputs[-1] == by_id[0].outputs[-1]]
    begins = [held for held in rows if len(named) >= 4 and held.handle.startswith(named)]
    fits = exact or by_id or begins
    if len(fits) == 1:
        return fits[0]
    if not fits:
        raise UnknownRowError(
            f"no quarantined row goes by {named!r}; `rl-pipeline quarantine list` shows them"
        )
    names = ", ".join(f"{h.handle} ({h.code}, {h.where})" for h in fits[:5])
    raise UnknownRowError(f"{len(fits)} quarantined rows go by {named!r}: name one of {names}")


def release(
    runs: Path, held: Held, why: str, actor: str | None = None, *, withdraw: bool = False
) -> dict[str, Any]:
    """Write down that a row is released from its check, or no longer is; returns the line.

    Raises:
        ReleaseRefusedError: the check cannot be waived, no reason is given, or nothing changes.
        ReleaseFileError: the decision file cannot be relied on.
    """
    if held.released is not withdraw:
        state = "not released" if withdraw else "released already"
        raise ReleaseRefusedError(f"row {held.handle} is {state}")
    return decide(
        runs,
        Decision(
            action="withdraw" if withdraw else "release",
            row_sha256=held.row_sha256,
            code=held.code,
            row_id=held.row_id,
            source=held.where,
            found=held.reason,
            why=why,
        ),
        actor,
    )
