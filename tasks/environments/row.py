"""Canonical rows: what data prep writes and every later stage reads."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Message = dict[str, str]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": …}`"""

AnswerKind = Literal["number", "code", "math", "text"]


class Row(BaseModel):
    """One problem. Answers stay strings: `033` is never read as 33."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    prompt: str
    """What the user says."""
    answer: str
    """The gold answer, as it stands in the source."""
    answer_kind: AnswerKind = "number"
    band: str = "all"
    """Difficulty band."""
    source: str = ""
    solution: str | None = None
    """A worked solution, where the source has one."""
    meta: dict[str, Any] = {}


class Demonstration(BaseModel):
    """A conversation SFT learns; loss falls on assistant messages from `learn_from` on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    row_id: str
    messages: list[Message]
    learn_from: int = 0
    """Index of the first message that may be learnt; assistant messages before it are context."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file data prep wrote; only a line feed ends a line."""
    return [Row.model_validate_json(line) for line in path.read_bytes().split(b"\n") if line]


def read_demonstrations(path: Path) -> list[Demonstration]:
    """The conversations data prep wrote."""
    lines = path.read_bytes().split(b"\n")
    return [Demonstration.model_validate_json(line) for line in lines if line]
