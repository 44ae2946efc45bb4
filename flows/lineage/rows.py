"""Data rows in the lineage: where a row came from, and what became of it.

A row is looked for by its id in what data prep wrote; RL says at which steps it was trained on,
evaluation whether it was answered.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.lineage.graph import Lineage, Node
from tasks.artifacts.store import Finished, StageFolder, finished_outputs

SPLITS = ("train.jsonl", "heldout.jsonl", "quarantine.jsonl")
SHOWN_STEPS = 8
SHOWN_CHARS = 80


def find_row(graph: Lineage, runs_dir: Path, row_id: str) -> Node | None:
    """The node of a data row, linked to every dataset that holds it; None where none does."""
    outputs = list(finished_outputs(runs_dir / "store"))
    key = f"row:{row_id}"
    facts: dict[str, str] = {}
    datasets: list[str] = []
    for folder, finished in outputs:
        if finished.record.kind != "dataset":
            continue
        for split in SPLITS:
            found = row_in(folder.path / split, row_id)
            if found is not None:
                line, row = found
                facts |= _row_facts(split, line, row, folder.path)
                if split != "quarantine.jsonl":
                    datasets.append(finished.record.sha256)
    if not facts:
        return None
    facts |= _uses(outputs, row_id)
    where = facts.pop("where")
    graph.add(Node(key, "row", f"row {row_id}", None, where, True, facts))
    for sha256 in dict.fromkeys(datasets):
        for source in graph.parents(sha256):
            graph.link(source.key, key)
        graph.link(key, sha256)
    return graph.node(key)


def row_in(path: Path, row_id: str) -> tuple[int, dict[str, Any]] | None:
    """Line number and content of a row in a JSONL file; None where it is not there."""
    for line, body in _lines_with(path, row_id):
        if row_id in (body.get("id"), body.get("row_id")):
            return line, body
    return None


def _lines_with(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines that hold `text`, parsed; most lines are never parsed."""
    needle = json.dumps(text, ensure_ascii=False)[1:-1].encode()
    try:
        raw = path.read_bytes()
    except OSError:
        return
    if not needle or needle not in raw:
        return
    for number, line in enumerate(raw.split(b"\n"), 1):
        if needle in line:
            body = json.loads(line)
            if isinstance(body, dict):
                yield number, body


def _row_facts(split: str, line: int, row: dict[str, Any], folder: Path) -> dict[str, str]:
    shown = row.get("row") if split == "quarantine.jsonl" else row
    prompt = str((shown or {}).get("prompt", ""))
    facts = {
        "where": f"{folder / split}:{line}",
        "split": split.removesuffix(".jsonl"),
        "prompt": prompt if len(prompt) <= SHOWN_CHARS else prompt[: SHOWN_CHARS - 1] + "…",
    }
    if split == "quarantine.jsonl":
        facts["quarantined"] = str(row.get("reason", ""))
    for name in ("source", "band"):
        if (shown or {}).get(name):
            facts[name] = str((shown or {})[name])
    return facts


def _uses(outputs: list[tuple[StageFolder, Finished]], row_id: str) -> dict[str, str]:
    """What later stages did with the row."""
    steps: list[int] = []
    answers: list[bool] = []
    shown = 0
    for folder, finished in outputs:
        if finished.record.kind == "dataset":
            hits = _lines_with(folder.path / "demonstrations.jsonl", row_id)
            shown = max(shown, sum(body.get("row_id") == row_id for _, body in hits))
        for _, body in _lines_with(folder.path / "trained_rows.jsonl", row_id):
            if row_id in body.get("row_ids", ()):
                steps.append(int(body["step"]))
        for _, body in _lines_with(folder.path / "policy.jsonl", row_id):
            if body.get("row_id") == row_id and "outcome" in body:
                answers.append(body["outcome"] == "correct")
    facts = {}
    if shown:
        facts["demonstrations"] = str(shown)
    if steps:
        more = f" and {len(steps) - SHOWN_STEPS} more" if len(steps) > SHOWN_STEPS else ""
        facts["trained on in RL at step"] = f"{', '.join(map(str, steps[:SHOWN_STEPS]))}{more}"
    if answers:
        facts["held-out answers"] = f"{sum(answers)} of {len(answers)} right"
    return facts
