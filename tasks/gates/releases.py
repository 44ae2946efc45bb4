"""Rows a person let out of the quarantine: which checks can be waived, and for which rows.

A release names a row by the hash of what stands in its file, and one check. Everything else still
binds. This module reads decisions; `flows.quarantine.decisions` writes, chains and signs them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.artifacts import hash_json
from tasks.artifacts.append_log import read_log
from tasks.gates.fields import FieldState

RELEASABLE = frozenset(["prompt_too_long", "duplicate_prompt", "prompt_no_text", "answer_no_text"])
"""`…_no_text` only where the field is a word such as `None`, which may be meant."""
_BINDING = {
    "leak": "it is in the held-out set: training on it would make every held-out figure a lie",
    "unparseable_answer": "no verifier can score its answer: mend the answer in the file, or set "
    "data.source.answer_kind",
    "duplicate_id": "samples are booked by id: give the row an id of its own in the file",
    "unparseable_line": "there is no row to read: mend the line in its file",
    "unknown_shape": "its file has no known columns: set data.source.mapping",
}
_MISSING = "there is nothing in the field to train on: mend the row in its file"


def why_bound(code: str, reason: str) -> str | None:
    """Why the check `code`, which found `reason`, cannot be waived; None where it can."""
    if code in _BINDING:
        return _BINDING[code]
    if code.endswith("_no_text") and FieldState.NAN_WORD.advice not in reason:
        return _MISSING
    if code in RELEASABLE:
        return None
    return _MISSING if code.endswith("_missing") else f"{code} is no check that can be waived"


def row_hash(row: Mapping[str, Any]) -> str:
    """What a row is known by, wherever its file lies: its content, as the quarantine shows it."""
    return hash_json(dict(row))


@dataclass(frozen=True)
class Releases:
    """The checks waived for each row, by `row_hash` and, for rows kept from earlier, by id."""

    by_row: Mapping[str, frozenset[str]] = field(default_factory=dict)
    by_id: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def of(self, row: Mapping[str, Any]) -> frozenset[str]:
        """Checks waived for a row, given as the quarantine would show it."""
        return self.by_row.get(row_hash(row), frozenset()) if self.by_row else frozenset()


def fold_decisions(decisions: Iterable[Mapping[str, Any]]) -> Releases:
    """What holds after all decisions, in order; the last one on a row and check counts."""
    held: dict[tuple[str, str], tuple[bool, str | None]] = {}
    for decision in decisions:
        code = str(decision["code"])
        released = decision["action"] == "release" and code in RELEASABLE
        held[str(decision["row_sha256"]), code] = (released, decision.get("row_id"))
    by_row: dict[str, set[str]] = {}
    by_id: dict[str, set[str]] = {}
    for (row, code), (released, row_id) in held.items():
        if released:
            by_row.setdefault(row, set()).add(code)
            if row_id is not None:
                by_id.setdefault(row_id, set()).add(code)
    return Releases(_frozen(by_row), _frozen(by_id))


def _frozen(sets: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(codes) for name, codes in sets.items()}


def read_releases(path: Path) -> Releases:
    """The releases of a decision file whose chain and signatures the caller has checked."""
    return fold_decisions(read_log(path).rows)
