"""What `rl-pipeline quarantine` prints. Rows are hostile text: control characters are shown."""

import json
import re
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from flows.commands.console import console
from flows.quarantine.rows import Held, UnknownRowError, find, quarantined, release
from tasks.artifacts.atomic import dump_json

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
SHORT = 60


def visible(text: str) -> str:
    """Text for a terminal: nothing in it can move the cursor, and nothing invisible hides."""
    shown = _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return escape(shown.encode("utf-8", "backslashreplace").decode())


def short(text: str, most: int = SHORT) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _all(runs: Path) -> list[Held]:
    rows, problems = quarantined(runs)
    for problem in problems:
        console(stderr=True).print(f"[yellow]{escape(problem)}[/]")
    return rows


def _of_run(rows: list[Held], runs: Path, run: str | None) -> list[Held]:
    if run is None:
        return rows
    name = (runs / run).resolve().name
    if not (runs / name).is_dir():
        raise UnknownRowError(f"no run {run!r} in {runs}; `ls {runs}` shows them")
    return [held for held in rows if name in held.runs]


def show_rows(runs: Path, check: str | None, run: str | None, last: int, as_json: bool) -> None:
    """Print rows, then how many each check set aside."""
    rows = _of_run(_all(runs), runs, run)
    rows = [held for held in rows if check in (None, held.code)]
    if as_json:
        for held in rows[:last]:
            sys.stdout.write(dump_json(_as_json(held)) + "\n")
        return
    out = console()
    if not rows:
        out.print("no row is in quarantine")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("row", "file:line", "reason", "state"):
        table.add_column(heading, overflow="fold")
    for held in rows[:last]:
        table.add_row(held.handle, visible(held.where), visible(short(held.reason)), _state(held))
    out.print(table)
    counts = Counter(held.code for held in rows)
    counted = ", ".join(f"{code} {count}" for code, count in counts.most_common())
    more = f" ({len(rows) - last} more: --last {len(rows)})" if len(rows) > last else ""
    out.print(f"\n{len(rows)} rows: {escape(counted)}{more}")


def _state(held: Held) -> str:
    if held.released:
        return "[green]released[/]"
    return "[dim]stays out[/]" if held.bound else "held"


def _as_json(held: Held) -> dict[str, Any]:
    return {
        "handle": held.handle,
        "check": held.code,
        "reason": held.reason,
        "row_id": held.row_id,
        "row_sha256": held.row_sha256,
        "source": held.source,
        "line": held.line,
        "split": held.split,
        "row": held.row,
        "runs": list(held.runs),
        "released": held.released,
        "releasable": held.bound is None,
    }


def show_row(runs: Path, named: str) -> None:
    """Print everything known about one row."""
    held = find(_all(runs), named)
    facts = {
        "row": held.handle,
        "id": held.row_id or "none",
        "file and line": held.where,
        "side": held.split,
        "check": held.code,
        "found": held.reason.partition(": ")[2] or held.reason,
        "runs": ", ".join(held.runs) or "none that finished data prep",
        "can be released": "yes" if held.bound is None else f"no: {held.bound}",
    }
    out = console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, visible(value))
    out.print(table)
    body = json.dumps(held.row, indent=2, ensure_ascii=False, sort_keys=True)
    out.print("\n" + visible(body), soft_wrap=True)
    for decision in held.decisions:
        when = datetime.fromtimestamp(float(decision["time"]), UTC).strftime("%Y-%m-%d %H:%M")
        said = f"{decision['action']} by {decision['actor']}, {when} UTC: {decision['why']}"
        out.print(f"[bold]{visible(said)}[/]")
    if held.bound is None and not held.released:
        out.print(
            f"\n[dim]rl-pipeline quarantine release {held.handle} --reason '…' lets it pass this "
            "check[/]"
        )


def release_row(runs: Path, named: str, why: str, actor: str | None, *, withdraw: bool) -> None:
    """Release a row, or take a release back, and say what comes of it."""
    held = find(_all(runs), named)
    line = release(runs, held, why, actor, withdraw=withdraw)
    out = console()
    did = "release withdrawn" if withdraw else "released"
    out.print(
        f"[green]{did}[/] {held.handle} ({visible(held.where)}) from {escape(held.code)}, signed "
        f"for {visible(str(line['actor']))}"
    )
    out.print(
        "the next run's data prep goes by it; every other check still binds: rl-pipeline plan",
        style="dim",
    )
