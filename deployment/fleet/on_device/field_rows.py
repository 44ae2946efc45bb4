"""What users allowed to be taken from the field log: nothing else leaves the device."""

import json
from pathlib import Path

from deployment.fleet.on_device.places import Places
from deployment.jetson.on_device.settings import FIELD_FOLDER

MAX_LINE_BYTES = 256 << 10


def opted_in(places: Places, max_rows: int, max_bytes: int) -> "dict[str, object]":
    """Rows with `opted_in: true`, newest files first, bounded in number and bytes.

    Returns `{"rows", "private", "unreadable", "left_out"}`: how many rows stayed because nobody
    allowed them, could not be read, or were over the bounds.
    """
    folder = places.root / FIELD_FOLDER
    rows, counts, size = [], {"private": 0, "unreadable": 0, "left_out": 0}, 0
    for line in _lines(folder):
        row = _row(line)
        if row is None:
            counts["unreadable"] += 1
        elif row.get("opted_in") is not True:
            counts["private"] += 1
        elif len(rows) >= max_rows or size + len(line) > max_bytes:
            counts["left_out"] += 1
        else:
            rows.append(row)
            size += len(line)
    return {"rows": rows, **counts}


def _lines(folder: Path):
    files = [p for p in folder.glob("*.jsonl*") if p.is_file() and not p.is_symlink()]
    for path in sorted(files, key=lambda p: p.stat().st_mtime_ns, reverse=True):
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    yield b"!"
                elif line.strip():
                    yield line


def _row(line: bytes) -> "dict | None":
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
