"""Gates in the report beside the data suite: rewards of every cycle, and the link to Data Docs."""

import os
from collections import Counter
from typing import Any

from flows.report.data import RunFiles, strings
from flows.report.text import clipped_line, finite, number
from tasks.rl.reward_gate import FILE_NAME

DOCS = "data_docs/index.html"


def docs_link(files: RunFiles) -> str:
    """Where Data Docs lie, seen from the run's folder; empty where there are none."""
    folder = files.folder("data")
    if folder is None or not (folder / DOCS).is_file():
        return ""
    return os.path.relpath((folder / DOCS).resolve(), files.run_dir.resolve())


def reward_gate(files: RunFiles) -> dict[str, Any]:
    """Cycles judged and failed; for each check how often, since when, and what was seen last."""
    if not files.ran("rl"):
        return {}
    lines = files.lines("rl", FILE_NAME)
    if not lines:
        return {}
    failed = [line for line in lines if line.get("passed") is not True]
    counts = Counter(code for line in failed for code in strings(line, "failed"))
    return {
        "words": f"{len(lines)} cycles, {len(failed)} failed",
        "verdict": "failed" if failed else "passed",
        "tone": "bad" if failed else "good",
        "checks": [
            {"name": code, "count": number(count, 6), **_last(code, failed)}
            for code, count in counts.most_common()
        ],
    }


def _last(code: str, failed: list[dict[str, Any]]) -> dict[str, str]:
    """First and last step a check failed at, and what the last failure says."""
    steps = [line for line in failed if code in strings(line, "failed")]
    first, last = steps[0], steps[-1]
    said = next(
        (part for part in str(last.get("why", "")).split("; ") if part.startswith(f"{code}:")), ""
    )
    return {
        "steps": f"{_step(first)} … {_step(last)}" if first is not last else _step(first),
        "said": clipped_line(said.partition(": ")[2], 160),
    }


def _step(line: dict[str, Any]) -> str:
    step = finite(line.get("step"))
    return number(step, 6) if step is not None else "?"
