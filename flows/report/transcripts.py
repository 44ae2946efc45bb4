"""Transcripts of two models side by side, on the same problems and the same seeds."""

from collections.abc import Sequence
from typing import Any

from flows.report.data import RunFiles, rows
from flows.report.text import clipped, number

MOST_CHARS = 2000
"""Shown of one message; the rest is counted."""
MOST_MESSAGES = 16
_KINDS = (
    # (first correct, second correct): heading, tone, how many are shown
    ((False, True), "{second} fixed it", "good", 4),
    ((True, False), "{second} broke it", "bad", 4),
    ((False, False), "wrong both times", "warn", 3),
    ((True, True), "right both times", "calm", 2),
)
_TONES = {"correct": "good", "wrong": "bad", "no_answer": "warn", "unscored": "warn"}
_ROLES = {"assistant": "agent", "tool": "tool", "user": "user", "system": "system"}


def transcripts(files: RunFiles) -> list[dict[str, Any]]:
    """Before and after RL."""
    before = files.lines("evaluation", "snapshot.jsonl")
    after = files.lines("evaluation", "policy.jsonl")
    return side_by_side(before, after, ("Before RL", "After RL"), "RL")


def side_by_side(
    first: Sequence[dict[str, Any]],
    second: Sequence[dict[str, Any]],
    names: tuple[str, str],
    credit: str,
) -> list[dict[str, Any]]:
    """A few problems of each kind, spread over the bands, first sample of each.

    Which are shown depends only on the answers: nobody picked the pretty ones. `credit` is who is
    said to have fixed or broken an answer.
    """
    before, after = _first_samples(first), _first_samples(second)
    shared = [row_id for row_id in before if row_id in after]
    shown = []
    for kind, heading, tone, count in _KINDS:
        ids = [i for i in shared if (_right(before[i]), _right(after[i])) == kind]
        title = heading.format(second=credit)
        for row_id in _spread(ids, [str(after[i].get("band", "")) for i in ids], count):
            shown.append(_pair(before[row_id], after[row_id], names, title, tone))
    return shown


def _first_samples(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(line.get("row_id")): line for line in lines if line.get("sample") == 0}


def _right(line: dict[str, Any]) -> bool:
    return line.get("outcome") == "correct"


def _spread(ids: Sequence[str], bands: Sequence[str], count: int) -> list[str]:
    """Up to `count` ids, one band after the other, in file order."""
    queues: dict[str, list[str]] = {}
    for row_id, band in zip(ids, bands, strict=True):
        queues.setdefault(band, []).append(row_id)
    picked: list[str] = []
    while len(picked) < count and any(queues.values()):
        for queue in queues.values():
            if queue and len(picked) < count:
                picked.append(queue.pop(0))
    return picked


def _pair(
    before: dict[str, Any],
    after: dict[str, Any],
    names: tuple[str, str],
    heading: str,
    tone: str,
) -> dict[str, Any]:
    messages = rows(after, "messages")
    asked = [m for m in messages if m.get("role") == "user"]
    return {
        "prompt": clipped(str(asked[0].get("content", "")) if asked else "(no prompt)", 300),
        "kind": heading,
        "tone": tone,
        "band": str(after.get("band", "")),
        "gold": clipped(str(after.get("gold", "")), 80),
        "sides": [_side(names[0], before), _side(names[1], after)],
    }


def _side(name: str, line: dict[str, Any]) -> dict[str, Any]:
    outcome = str(line.get("outcome", "unknown"))
    said = answer_part(rows(line, "messages"))
    facts = [f"{number(line.get('tokens'), 6)} tokens"]
    if line.get("extracted") is not None:
        facts.append(f"read as {clipped(str(line['extracted']), 80)}")
    if line.get("truncated"):
        facts.append("cut off")
    if line.get("reason"):
        facts.append(clipped(str(line["reason"]), 200))
    return {
        "name": name,
        "outcome": outcome.replace("_", " "),
        "tone": _TONES.get(outcome, "warn"),
        "messages": [message(m) for m in said[:MOST_MESSAGES]],
        "facts": " · ".join(facts),
    }


def answer_part(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """From the agent's first message on; what stands before is the prompt."""
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            return messages[index:]
    return []


def message(said: dict[str, Any]) -> dict[str, str]:
    """One message for the template."""
    role = _ROLES.get(str(said.get("role")), "other")
    return {
        "role": role,
        "css": role,
        "content": clipped(str(said.get("content", "")), MOST_CHARS),
    }
