"""The rules of the field loop: which rows of devices can train, which a person must look at.

A model's own answer never trains: it may be wrong, and whoever asked may have wanted it so. A row
can train where its right answer is known without the model: a verifier works it out from the
prompt (the calculator's problems), or a person wrote it into the review file. Everything else goes
there. Text from the field is hostile: control and direction characters are taken out, the model's
special strings are broken, lengths are bounded.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.artifacts import hash_json
from tasks.environments.calculator_tool import evaluate
from tasks.environments.sanitise import sanitise
from tasks.environments.toolcall import ToolError

MAX_PROMPT_CHARS = 4096
MAX_ANSWER_CHARS = 4096
_ARITHMETIC = re.compile(r"\s*([0-9(][0-9+\-*() ]*)=\s*\?\s*")
_INVISIBLE = ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp")
_KEPT = "\n\t\u200d"
"""Joins emoji and scripts; it hides nothing."""


@dataclass
class Sorted:
    """Rows of a collect, sorted."""

    training: list[dict[str, Any]] = field(default_factory=list)
    """`{"id", "prompt", "answer", "origin"}`."""
    review: list[dict[str, Any]] = field(default_factory=list)
    """The same with `answer: null`, the model's answer, and why it is here."""
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        """One more row of this kind."""
        self.counts[what] = self.counts.get(what, 0) + 1


def clean_text(text: str, specials: Sequence[str], limit: int) -> str:
    """Text without what a reader cannot see, special strings broken, cut to `limit` characters."""
    kept = (c for c in text if c in _KEPT or unicodedata.category(c) not in _INVISIBLE)
    return sanitise(unicodedata.normalize("NFC", "".join(kept)), specials)[:limit].strip()


def question_of(row: Mapping[str, Any]) -> str | None:
    """The one thing the user asked; None where it was a longer conversation, or nothing."""
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        return None
    asked = [m.get("content") for m in messages if m.get("role") == "user"]
    told = [m for m in messages if m.get("role") not in ("user", "system")]
    return asked[0] if len(asked) == 1 and not told and isinstance(asked[0], str) else None


def known_answer(prompt: str) -> str | None:
    """The right answer where it follows from the prompt alone: `34*7-52=?`."""
    match = _ARITHMETIC.fullmatch(prompt)
    if match is None:
        return None
    try:
        return str(evaluate(match[1]))
    except ToolError:
        return None


def row_id(prompt: str) -> str:
    """What makes two rows the same: the prompt, whatever its case and spacing."""
    folded = " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())
    return "field-" + hash_json(folded)[:32]


def sort_rows(
    rows: Iterable[Mapping[str, Any]],
    device: str,
    specials: Sequence[str],
    seen: Collection[str],
) -> Sorted:
    """Sort what a device sent; `seen` ids were taken by an earlier collect."""
    found, taken = Sorted(), set(seen)
    for row in rows:
        if row.get("opted_in") is not True:
            found.count("private")
            continue
        question = question_of(row)
        prompt = clean_text(question, specials, MAX_PROMPT_CHARS) if question else ""
        if not prompt:
            found.count("no single question")
            continue
        key = row_id(prompt)
        if key in taken:
            found.count("seen before")
            continue
        taken.add(key)
        _place(found, row, prompt, key, device, specials)
    return found


def _place(
    found: Sorted,
    row: Mapping[str, Any],
    prompt: str,
    key: str,
    device: str,
    specials: Sequence[str],
) -> None:
    release = row.get("release")
    origin = {"device": device, "release": release if isinstance(release, str) else None}
    answer = known_answer(prompt)
    if answer is not None:
        found.training.append({"id": key, "prompt": prompt, "answer": answer, "origin": origin})
        found.count("can train")
        return
    said = row.get("answer")
    found.review.append(
        {
            "id": key,
            "prompt": prompt,
            "answer": None,
            "model_answer": clean_text(said, specials, MAX_ANSWER_CHARS)
            if isinstance(said, str)
            else None,
            "failed": row.get("error") not in (None, "", False),
            "origin": origin,
        }
    )
    found.count("to review")


def accepted(
    rows: Iterable[Mapping[str, Any]], specials: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Rows of a review file that a person has given an answer."""
    kept = []
    for row in rows:
        prompt, answer = row.get("prompt"), row.get("answer")
        if not isinstance(prompt, str) or not isinstance(answer, str) or not answer.strip():
            continue
        text = clean_text(prompt, specials, MAX_PROMPT_CHARS)
        right = clean_text(answer, specials, MAX_ANSWER_CHARS)
        origin = row.get("origin") if isinstance(row.get("origin"), Mapping) else None
        kept.append({"id": row_id(text), "prompt": text, "answer": right, "origin": origin})
    return kept
