"""Brings opted-in rows of devices back, once each, as files for the next night or for a person."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema.devices import Device
from deployment.fleet.books import DeviceBooks, now
from deployment.fleet.errors import DeployError
from deployment.fleet.field import Sorted, accepted, sort_rows
from deployment.fleet.remote import Remote
from deployment.fleet.ssh import Shell
from tasks.artifacts import hash_json, write_jsonl
from tasks.artifacts.append_log import locked_log, read_log
from tasks.artifacts.errors import ArtifactCorruptError

MAX_BYTES = 8 << 20
"""Of rows from one device."""
FOLDER = "field"


class ReviewFileError(ValueError):
    """A review file that cannot be read."""


@dataclass
class Collected:
    """What a collect brought."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By device: how many rows of each kind, rows the device kept back included."""
    failed: dict[str, str] = field(default_factory=dict)
    training: Path | None = None
    review: Path | None = None
    training_rows: int = 0
    review_rows: int = 0


def _specials(device: str, books: DeviceBooks) -> list[str]:
    """Special strings of the model that a device serves, as its bundle names them."""
    record = books.record(device) or {}
    path = Path(str(record.get("bundle") or "")) / "manifest.json"
    try:
        found = json.loads(path.read_bytes())["prompt"]["special_strings"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [text for text in found if isinstance(text, str) and text]


def collect(
    devices: Sequence[Device],
    known_hosts: Path,
    runs_dir: Path,
    into: Path,
    *,
    max_rows: int,
) -> Collected:
    """Ask each device, sort what comes, write both files whole, then note what was taken.

    A kill between the last two brings the same rows again, into files of the same names.

    Raises:
        ArtifactWriteError: the disk refused; nothing is noted as taken.
    """
    books, done = DeviceBooks(runs_dir), Collected()
    training: list[dict[str, Any]] = []
    review: list[dict[str, Any]] = []
    with locked_log(runs_dir / FOLDER / "seen.jsonl") as log:
        seen = {str(row.get("id")) for row in log.lines().rows}
        for device in devices:
            try:
                brought = _ask(device, known_hosts, max_rows)
            except DeployError as error:
                done.failed[device.name] = str(error)
                continue
            found = sort_rows(brought["rows"], device.name, _specials(device.name, books), seen)
            done.counts[device.name] = _counts(found, brought)
            training += found.training
            review += found.review
            seen |= {str(row["id"]) for row in (*found.training, *found.review)}
        done.training, done.training_rows = _written(into, "field", training), len(training)
        done.review = _written(runs_dir / FOLDER, "review", review)
        done.review_rows = len(review)
        time = now()
        for row in (*training, *review):
            log.append({"id": row["id"], "time": time, "device": row["origin"]["device"]})
    return done


def _counts(found: Sorted, brought: dict[str, Any]) -> dict[str, int]:
    kept_back = {
        "private": int(brought.get("private", 0)),
        "unreadable": int(brought.get("unreadable", 0)),
        "left for later": int(brought.get("left_out", 0)),
    }
    counts = dict(found.counts)
    for what, number in kept_back.items():
        if number:
            counts[what] = counts.get(what, 0) + number
    return counts


def _ask(device: Device, known_hosts: Path, max_rows: int) -> dict[str, Any]:
    with Shell(device, known_hosts) as shell:
        brought = Remote(shell).call(
            "collect", agent="agent", max_rows=max_rows, max_bytes=MAX_BYTES
        )
    rows = brought.get("rows")
    kept = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {**brought, "rows": kept[:max_rows]}


def _written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path | None:
    """A file named by what it holds; none for no rows."""
    if not rows:
        return None
    return write_jsonl(folder / f"{kind}-{hash_json(rows)[:12]}.jsonl", rows)


def accept(review: Path, into: Path) -> tuple[Path | None, int, int]:
    """Write the answered rows of a review file for the next night; (file, taken, left).

    Raises:
        ReviewFileError: no such file, or a line that is no JSON object.
    """
    if not review.is_file():
        raise ReviewFileError(f"{review}: no such file; rl-pipeline collect writes review files")
    try:
        lines = read_log(review)
    except OSError as error:
        raise ArtifactCorruptError(f"{review} cannot be read: {error.strerror}", review) from error
    if lines.unreadable:
        numbers = ", ".join(map(str, lines.unreadable[:5]))
        raise ReviewFileError(f"{review}: line {numbers} is no JSON object; correct it")
    rows = accepted(lines.rows)
    return _written(into, "field-reviewed", rows), len(rows), len(lines.rows) - len(rows)
