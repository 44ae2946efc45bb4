"""Gates candidates, sets failing ones aside with a reason, splits, and takes leaks out.

The held-out side is never changed by what is in training: leaks leave the training side.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.schema.data import DataConfig
from tasks.data.candidate import Candidate, Quarantined
from tasks.data.errors import NoTrainingRowsError
from tasks.data.sources import Loaded
from tasks.environments.row import Row
from tasks.gates.dataset import UNIQUE_CODES, DatasetLimits, dataset_frame, dataset_suite
from tasks.gates.fields import field_state
from tasks.gates.prompt_key import prompt_key
from tasks.gates.validation import INDEX_COLUMN, validate_frame
from tasks.gates.verdict import GateVerdict
from tasks.rewards.verifiers import gold_parses

if TYPE_CHECKING:
    import pandas as pd

REMOVED_AS_INTENDED = frozenset(["leak", "duplicate_prompt"])
"""Removing these is what cleaning is for: they do not count against the quarantined share."""


@dataclass(frozen=True)
class Cleaned:
    """What is left of both sides, what was set aside, and what the gate said at each look."""

    train: list[Candidate]
    heldout: list[Candidate]
    quarantined: list[Quarantined]
    verdicts: list[GateVerdict]
    """Over the rows as read: they say which rows to set aside, and may have failed."""
    given_up: int = 0
    """Rows the source would hold out now, but for the held-out set that is frozen."""


def clean(loaded: Loaded, config: DataConfig, quarantined: list[Quarantined]) -> Cleaned:
    """Both sides without rows that fail the gate, duplicates and leaks.

    `quarantined` is filled as rows are set aside, so that it is known even where this raises.

    Raises:
        NoTrainingRowsError: nothing is left to train on.
    """
    quarantined += loaded.quarantined
    dropped = [row for row in loaded.train if row.dropped]
    source = [row for row in loaded.train if not row.dropped]
    train, verdict = set_aside(source, "train", config, quarantined)
    verdicts = [verdict]
    if loaded.heldout is None:
        heldout, train = split(train, _heldout_share(config), config.seed)
    else:
        heldout, verdict = set_aside(loaded.heldout, "heldout", config, quarantined)
        verdicts.append(verdict)
    asked = _capped(heldout, getattr(config.source, "max_heldout_rows", None), config.seed)
    given_up: list[Candidate] = []
    if loaded.frozen is not None:
        given_up = _not_among(asked, loaded.frozen)
        asked, heldout = loaded.frozen, [*loaded.frozen, *_not_among(heldout, given_up)]
    if loaded.heldout is None:
        train += given_up
    before = len(train)
    train = without_leaks(train, heldout, quarantined)
    if dropped:
        both = [*train, *without_leaks(dropped, heldout, quarantined)]
        kept, verdict = set_aside(both, "train", config, quarantined)
        verdicts.append(verdict)
        dropped = [row for row in kept if row.dropped]
    if not train and not dropped:
        raise NoTrainingRowsError(_nothing_left(before, quarantined))
    train = _capped(train, getattr(config.source, "max_train_rows", None), config.seed)
    return Cleaned([*train, *dropped], asked, quarantined, verdicts, len(given_up))


def _not_among(rows: Sequence[Candidate], others: Sequence[Candidate]) -> list[Candidate]:
    ids = {row.id for row in others}
    return [row for row in rows if row.id not in ids]


def _heldout_share(config: DataConfig) -> float:
    return float(getattr(config.source, "heldout_share", 0.1))


def _nothing_left(before: int, quarantined: Sequence[Quarantined]) -> str:
    reasons = Counter(item.code for item in quarantined if item.split == "train")
    counted = ", ".join(f"{code} {count}" for code, count in sorted(reasons.items()))
    leaks = " after leak removal" if before else ""
    return (
        f"no training rows are left{leaks}: {counted or 'the source is empty'}; use training and "
        "held-out files that do not overlap, or mend the rows listed in quarantine.jsonl"
    )


def set_aside(
    rows: Sequence[Candidate], split_name: str, config: DataConfig, quarantined: list[Quarantined]
) -> tuple[list[Candidate], GateVerdict]:
    """Rows that pass the gate one by one; the others are added to `quarantined`.

    Of rows with the same id or prompt the first that is otherwise sound stays.
    """
    limits = DatasetLimits(min_rows=1, max_prompt_chars=config.gate.max_prompt_chars)
    frame = _frame(rows, split_name)
    verdict = validate_frame(frame, dataset_suite(f"{split_name} as read", limits))
    names = list(frame[INDEX_COLUMN])
    codes = _codes_by_row(verdict)
    unsound = {name for name, found in codes.items() if not set(found) <= set(UNIQUE_CODES)}
    kept: list[Candidate] = []
    first_of: dict[tuple[str, str], Candidate] = {}
    for name, row in zip(names, rows, strict=True):
        if name in unsound:
            code = next(c for c in codes[name] if c not in UNIQUE_CODES)
            reason = f"{code}: {_detail(code, row, config)}"
        else:
            reason = _repeats(row, first_of)
        if reason:
            quarantined.append(row.set_aside(reason, split_name))
        else:
            kept.append(row)
    return kept, verdict


def _codes_by_row(verdict: GateVerdict) -> dict[str, list[str]]:
    codes: dict[str, list[str]] = {}
    for failure in verdict.row_failures:
        codes.setdefault(failure.row, []).append(failure.code)
    return codes


def _repeats(row: Candidate, first_of: dict[tuple[str, str], Candidate]) -> str:
    """Reason a sound row repeats an earlier sound one; remembers it where it does not."""
    keys = {"duplicate_prompt": prompt_key(row.prompt), "duplicate_id": row.id}
    for code, key in keys.items():
        first = first_of.get((code, key))
        if first is not None and code not in row.waived:
            where = f" on line {first.line}" if first.line else ""
            differs = "" if first.answer == row.answer else f", which answers {first.answer!r}"
            return f"{code}: of row {first.id!r}{where}{differs}"
    for named in keys.items():
        first_of.setdefault(named, row)
    return ""


def _detail(code: str, row: Candidate, config: DataConfig) -> str:
    if code.startswith("prompt_too_long"):
        most = config.gate.max_prompt_chars
        return f"{len(row.prompt)} characters, data.gate.max_prompt_chars={most}"
    if code == "unparseable_answer":
        return gold_parses(row.answer_kind, row.answer) or ""
    value = row.answer if code.startswith("answer") else row.prompt
    return field_state(value).advice


def _frame(
    rows: Sequence[Candidate | Row],
    split_name: str,
    heldout: frozenset[str] = frozenset(),
    waived: Mapping[str, frozenset[str]] | None = None,
) -> "pd.DataFrame":
    """The gate's frame; candidates know what they were released from, rows are told by id."""

    def released(row: Candidate | Row) -> frozenset[str]:
        return row.waived if isinstance(row, Candidate) else (waived or {}).get(row.id, frozenset())

    return dataset_frame(
        [
            {
                INDEX_COLUMN: f"{split_name}-{index}",
                "id": row.id,
                "prompt": row.prompt,
                "answer": row.answer,
                "answer_kind": row.answer_kind,
                "waived": released(row),
            }
            for index, row in enumerate(rows)
        ],
        heldout,
    )


def gate_rows(
    rows: Sequence[Row],
    split_name: str,
    min_rows: int,
    config: DataConfig,
    heldout: Sequence[Row],
    waived: Mapping[str, frozenset[str]] | None = None,
) -> GateVerdict:
    """The verdict that counts: over rows as written, with the row count the config asks for.

    `waived` holds, by id, the checks that rows were released from.
    """
    limits = DatasetLimits(min_rows, config.gate.max_prompt_chars)
    keys = frozenset(prompt_key(row.prompt) for row in heldout) if split_name == "train" else None
    frame = _frame(rows, split_name, keys or frozenset(), waived)
    return validate_frame(frame, dataset_suite(split_name, limits))


def _draw(row: Candidate, seed: int) -> str:
    """A number that depends on the problem and the seed only, not on the order of the file."""
    return hashlib.sha256(f"{seed}\0{prompt_key(row.prompt)}".encode()).hexdigest()


def split(
    rows: Sequence[Candidate], heldout_share: float, seed: int
) -> tuple[list[Candidate], list[Candidate]]:
    """Held-out and training rows of one file, each in the file's order."""
    count = round(heldout_share * len(rows))
    count = min(max(count, 1), len(rows) - 1) if len(rows) > 1 else 0
    chosen = {row.id for row in sorted(rows, key=lambda row: _draw(row, seed))[:count]}
    return [r for r in rows if r.id in chosen], [r for r in rows if r.id not in chosen]


def without_leaks(
    train: Sequence[Candidate], heldout: Sequence[Candidate], quarantined: list[Quarantined]
) -> list[Candidate]:
    """Training rows whose prompt is not held out, up to case, width and spacing."""
    held = {prompt_key(row.prompt): row for row in heldout}
    kept = []
    for row in train:
        twin = held.get(prompt_key(row.prompt)) if isinstance(row.prompt, str) else None
        if twin is None:
            kept.append(row)
        else:
            reason = f"leak: the prompt of held-out row {twin.id!r}"
            quarantined.append(row.set_aside(reason, "train"))
    return kept


def _capped(rows: list[Candidate], most: int | None, seed: int) -> list[Candidate]:
    """At most `most` rows, drawn by `seed`, in the file's order."""
    if most is None or len(rows) <= most:
        return rows
    chosen = {row.id for row in sorted(rows, key=lambda row: _draw(row, seed))[:most]}
    return [row for row in rows if row.id in chosen]


def quarantined_share(quarantined: Sequence[Quarantined], kept: int) -> float:
    """Share of all rows read that were set aside for a fault of their own."""
    faulty = sum(1 for item in quarantined if item.code not in REMOVED_AS_INTENDED)
    total = kept + len(quarantined)
    return faulty / total if total else 0.0
