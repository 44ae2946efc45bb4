"""Rows on their way through cleaning: still with whatever the source put in their fields."""

from dataclasses import dataclass, field
from typing import Any

from tasks.artifacts import hash_json
from tasks.data.jsonl import DecimalText
from tasks.environments.row import Message, Row


@dataclass(frozen=True)
class Candidate:
    """One row as read. `prompt` and `answer` may hold anything until the gate has passed them."""

    id: str
    line: int | None
    prompt: Any
    answer: Any
    answer_kind: str
    band: str = "all"
    source: str = ""
    solution: str | None = None
    messages: list[Message] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    """The row as it stood in its file, for the quarantine."""
    dropped: bool = False
    """From the drop folder: it belongs to the training side, whatever is split."""
    waived: frozenset[str] = frozenset()
    """Checks a person released it from; all others bind."""

    def set_aside(self, reason: str, split: str) -> "Quarantined":
        """This row with the reason it does not take part."""
        return Quarantined(self.id, self.line, reason, self.raw, split, self.source)

    def shown(self) -> dict[str, Any]:
        """The row as the quarantine shows it, which is what a release names."""
        return dict(json_safe(self.raw))

    def row(self) -> Row:
        """The canonical row; raises pydantic's ValidationError where the gate was not asked."""
        return Row(
            id=self.id,
            prompt=self.prompt,
            answer=self.answer,
            answer_kind=self.answer_kind,
            band=self.band,
            source=self.source,
            solution=self.solution,
            meta=self.meta,
        )

    @classmethod
    def of(cls, row: Row) -> "Candidate":
        """A generated row, which has no line in a file."""
        return cls(
            id=row.id,
            line=None,
            prompt=row.prompt,
            answer=row.answer,
            answer_kind=row.answer_kind,
            band=row.band,
            source=row.source,
            solution=row.solution,
            meta=row.meta,
            raw=row.model_dump(),
        )


@dataclass(frozen=True)
class Quarantined:
    """One row or line that was set aside. `reason` is `code: what was found`."""

    row_id: str | None
    line: int | None
    reason: str
    row: dict[str, Any]
    split: str
    source: str = ""
    """File it came from, or what made it."""

    @property
    def code(self) -> str:
        """The reason's short name."""
        return self.reason.partition(":")[0]

    def to_json(self) -> dict[str, Any]:
        """One line of `quarantine.jsonl`."""
        return {
            "row_id": self.row_id,
            "line": self.line,
            "reason": self.reason,
            "row": json_safe(self.row),
            "split": self.split,
            "source": self.source,
        }


def content_id(prompt: Any, answer: Any) -> str:
    """The id of a row that brought none: the hash of what it says."""
    return f"row-{hash_json([json_safe(prompt), json_safe(answer)])[:16]}"


def as_text(value: Any) -> Any:
    """A scalar as the text it was written in; missing values and containers stay what they are."""
    if isinstance(value, DecimalText):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and value == value:
        return repr(value)
    return value


def json_safe(value: Any) -> Any:
    """`value` with everything JSON cannot hold turned to text: NaN, dates, bytes."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return str(value) if isinstance(value, DecimalText) else value
    if isinstance(value, float) and value - value == 0:
        return value
    return str(value)
