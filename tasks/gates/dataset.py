"""The suite over canonical rows: row count and columns first, then not-null, then values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.gates.fields import FieldState, field_state
from tasks.gates.prompt_key import prompt_key
from tasks.gates.validation import INDEX_COLUMN, Suite
from tasks.rewards.verifiers import gold_parses

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    INDEX_COLUMN,
    "id",
    "prompt",
    "prompt_state",
    "prompt_chars",
    "prompt_key",
    "answer",
    "answer_state",
    "gold_parses",
    "gold_problem",
    "leaks",
    "waived",
)
UNIQUE_CODES = ("duplicate_prompt", "duplicate_id")
"""Checks whose first failing row of each group may stay."""


@dataclass(frozen=True)
class DatasetLimits:
    """Bounds of the suite."""

    min_rows: int
    max_prompt_chars: int


def dataset_frame(
    rows: Sequence[Mapping[str, Any]], heldout_keys: frozenset[str] = frozenset()
) -> "pd.DataFrame":
    """The frame the suite runs on.

    Args:
        rows: mappings with `row` (a name of its own), `id`, `prompt`, `answer`, `answer_kind`, and
            perhaps `waived`: codes of checks a person released the row from. Those checks see a
            value that passes, in a column that names them; the leak check cannot be waived.
        heldout_keys: `prompt_key`s of the held-out side; a training row with one of them leaks.
    """
    import pandas as pd

    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in rows:
        for name, value in _frame_row(row, heldout_keys).items():
            columns[name].append(value)
    return pd.DataFrame({n: pd.Series(v, dtype=object) for n, v in columns.items()})


def _frame_row(row: Mapping[str, Any], heldout_keys: frozenset[str]) -> dict[str, Any]:
    prompt, answer, kind = row["prompt"], row["answer"], row["answer_kind"]
    prompt_state, answer_state = field_state(prompt), field_state(answer)
    if answer_state is FieldState.NAN_WORD and kind in ("text", "code"):
        answer_state = FieldState.TEXT  # there the word may be the answer
    waived: frozenset[str] = row.get("waived", frozenset())
    if "prompt_no_text" in waived and prompt_state is FieldState.NAN_WORD:
        prompt_state = FieldState.TEXT
    if "answer_no_text" in waived and answer_state is FieldState.NAN_WORD:
        answer_state = FieldState.TEXT  # so its gold must parse
    key = prompt_key(prompt) if isinstance(prompt, str) else None
    leaks = key in heldout_keys
    if key and "duplicate_prompt" in waived:
        key = f"{key}\0{row[INDEX_COLUMN]}"
    counted = isinstance(prompt, str) and "prompt_too_long" not in waived
    problem = gold_parses(kind, answer) if answer_state is FieldState.TEXT else None
    return {
        INDEX_COLUMN: row[INDEX_COLUMN],
        "id": row["id"],
        "prompt": prompt,
        "prompt_state": prompt_state.value,
        "prompt_chars": len(prompt) if counted else 0,
        "prompt_key": key or None,
        "answer": answer,
        "answer_state": answer_state.value,
        "gold_parses": problem is None,
        "gold_problem": problem,
        "leaks": leaks,
        "waived": ", ".join(sorted(waived)),
    }


def dataset_suite(name: str, limits: DatasetLimits) -> Suite:
    """Expectations over `dataset_frame`, in the order they are shown."""
    import great_expectations.expectations.core as gxe

    text = FieldState.TEXT.value

    def coded(code: str) -> dict[str, str]:
        return {"code": code}

    return name, [
        gxe.ExpectTableRowCountToBeBetween(min_value=limits.min_rows, meta=coded("row_count")),
        gxe.ExpectTableColumnsToMatchSet(
            column_set=list(COLUMNS), exact_match=True, meta=coded("columns")
        ),
        gxe.ExpectColumnValuesToNotBeNull(column="id", meta=coded("id_missing")),
        gxe.ExpectColumnValuesToNotBeNull(column="prompt", meta=coded("prompt_missing")),
        gxe.ExpectColumnValuesToNotBeNull(column="answer", meta=coded("answer_missing")),
        gxe.ExpectColumnValuesToBeInSet(
            column="prompt_state", value_set=[text], meta=coded("prompt_no_text")
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="answer_state", value_set=[text], meta=coded("answer_no_text")
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="prompt_chars",
            max_value=limits.max_prompt_chars,
            meta=coded("prompt_too_long"),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="gold_parses", value_set=[True], meta=coded("unparseable_answer")
        ),
        gxe.ExpectColumnValuesToBeInSet(column="leaks", value_set=[False], meta=coded("leak")),
        gxe.ExpectColumnValuesToBeUnique(column="prompt_key", meta=coded("duplicate_prompt")),
        gxe.ExpectColumnValuesToBeUnique(column="id", meta=coded("duplicate_id")),
    ]
