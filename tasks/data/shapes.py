"""Recognises the shape of a user's file and reads its rows as candidates.

Shapes: `gsm8k` (`question`, `answer` with `####`), `prompt/answer`, `question/answer`, and chat
`messages`. A mapping in the config overrules what is recognised, column by column.
"""

from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema.data import FileSource, Mapping
from tasks.data.candidate import Candidate, as_text, content_id, json_safe
from tasks.data.chat import ChatShapeError, read_chat
from tasks.data.errors import UnknownShapeError
from tasks.data.jsonl import Record
from tasks.environments import gsm8k
from tasks.rewards.verifiers import stated_answer

SAMPLE = 200
"""Rows looked at to recognise a shape."""


@dataclass(frozen=True)
class Shape:
    """What was recognised: its name, and which column holds what."""

    name: str
    prompt: str | None = None
    answer: str | None = None
    id: str | None = None
    band: str | None = None
    messages: str | None = None
    solution: str | None = None

    def columns(self) -> dict[str, str]:
        """Field to column, for the summary."""
        fields = ("prompt", "answer", "id", "band", "messages", "solution")
        return {name: getattr(self, name) for name in fields if getattr(self, name)}


def recognise(records: Sequence[Record], mapping: Mapping, where: str) -> Shape:
    """The shape of a file.

    Raises:
        UnknownShapeError: no known shape, or a mapped column is in no row.
    """
    seen = list(dict.fromkeys(name for record in records for name in record.values))
    for field, column in mapping.model_dump().items():
        if column is not None and column not in seen:
            raise UnknownShapeError(
                f"data.source.mapping.{field}={column!r} is no column of {where}; it has "
                f"{', '.join(map(repr, seen)) or 'none'}"
            )
    messages = mapping.messages or _first(seen, "messages")
    if messages and not mapping.prompt:
        return _shape("messages", mapping, seen, messages=messages, answer=_first(seen, "answer"))
    prompt = mapping.prompt or _first(seen, "prompt", "question")
    answer = mapping.answer or _first(seen, "answer")
    if prompt is None or answer is None:
        raise UnknownShapeError(
            f"{where} has the columns {', '.join(map(repr, seen)) or 'none'}; known shapes are "
            "prompt/answer, question/answer (GSM8K) and messages. Name yours in "
            "data.source.mapping, e.g. data.source.mapping.prompt=text data.source.mapping.answer="
            "label"
        )
    if answer == "answer" and prompt == "question" and _hashed(records, answer):
        return _shape("gsm8k", mapping, seen, prompt=prompt, answer=answer)
    return _shape(f"{prompt}/{answer}", mapping, seen, prompt=prompt, answer=answer)


def _shape(
    name: str,
    mapping: Mapping,
    seen: Sequence[str],
    *,
    prompt: str | None = None,
    answer: str | None = None,
    messages: str | None = None,
) -> Shape:
    return Shape(
        name=name,
        prompt=prompt,
        answer=mapping.answer or answer,
        id=mapping.id or _first(seen, "id"),
        band=mapping.band or _first(seen, "band"),
        messages=messages,
        solution=mapping.solution or (_first(seen, "solution") if name != "gsm8k" else None),
    )


def _first(seen: Sequence[str], *names: str) -> str | None:
    return next((name for name in names if name in seen), None)


def _hashed(records: Sequence[Record], column: str) -> bool:
    """True where most of the first answers have a `####` line."""
    answers = [record.values.get(column) for record in records[:SAMPLE]]
    marked = [isinstance(a, str) and gsm8k.final_answer(a) is not None for a in answers]
    return sum(marked) * 2 > len(marked)


def read_candidate(record: Record, shape: Shape, source: FileSource, where: str) -> Candidate:
    """One row; what is wrong with it is found by the gate."""
    values = record.values
    if shape.messages:
        fields = _chat_fields(values, shape, source.answer_kind)
    else:
        fields = _plain_fields(values, shape)
    used = set(shape.columns().values())
    given = as_text(values.get(shape.id)) if shape.id else None
    band = as_text(values.get(shape.band)) if shape.band else None
    return Candidate(
        id=_given_id(given) or content_id(fields["prompt"], fields["answer"]),
        line=record.line,
        prompt=fields["prompt"],
        answer=fields["answer"],
        answer_kind=source.answer_kind,
        band=band if isinstance(band, str) and band.strip() else fields.get("band", "all"),
        source=where,
        solution=fields.get("solution"),
        messages=fields.get("messages"),
        meta=_rest(values, used, fields.get("system")),
        raw=dict(values),
    )


def _given_id(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _rest(values: MappingType[str, Any], used: set[str], system: str | None) -> dict[str, Any]:
    """Columns that have no field of their own, and a chat's system message."""
    columns = {name: json_safe(value) for name, value in values.items() if name not in used}
    return {
        **({"columns": columns} if columns else {}),
        **({"system": system} if system is not None else {}),
    }


def _plain_fields(values: MappingType[str, Any], shape: Shape) -> dict[str, Any]:
    prompt, answer = (as_text(values.get(name or "")) for name in (shape.prompt, shape.answer))
    if shape.name == "gsm8k" and isinstance(answer, str):
        return {
            "prompt": prompt,
            "answer": gsm8k.final_answer(answer),
            "solution": gsm8k.clean_solution(answer),
            "band": gsm8k.band(answer),
        }
    return {"prompt": prompt, "answer": answer, "solution": _solution(values, shape)}


def _solution(values: MappingType[str, Any], shape: Shape) -> str | None:
    solution = as_text(values.get(shape.solution)) if shape.solution else None
    return solution if isinstance(solution, str) and solution.strip() else None


def _chat_fields(values: MappingType[str, Any], shape: Shape, answer_kind: str) -> dict[str, Any]:
    """Prompt and answer of a conversation; a column `answer` goes before its last message."""
    given = as_text(values.get(shape.answer)) if shape.answer else None
    try:
        chat = read_chat(values.get(shape.messages or ""))
    except ChatShapeError:
        return {"prompt": None, "answer": given}
    answer = given if given is not None else stated_answer(answer_kind, chat.reply or "")
    return {
        "prompt": chat.prompt,
        "answer": answer,
        "solution": _solution(values, shape),
        "messages": chat.messages if chat.reply is not None else None,
        "system": chat.system,
    }
