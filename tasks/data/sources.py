"""Where rows come from: generated, a reasoning-gym generator, files, or a public dataset id."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema.data import CalculatorSource, DataConfig, FileSource, ReasoningGymSource
from tasks.data.candidate import Candidate, Quarantined
from tasks.data.errors import (
    DataError,
    DataFileEmptyError,
    DataFileMissingError,
    DatasetLibraryMissingError,
    DatasetUnavailableError,
)
from tasks.data.jsonl import FileContents, Record, read_jsonl
from tasks.data.shapes import read_candidate, recognise
from tasks.data.tables import read_parquet
from tasks.environments.calculator_problems import calculator_problems
from tasks.environments.row import Row
from tasks.gates.prompt_key import prompt_key
from tasks.rewards.verifiers import gold_parses

_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::[\w.-]+)?")
_FILE_SUFFIXES = frozenset(
    [".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".txt", ".gz", ".zip"]
)
SURPLUS = 4
"""Times the wanted rows that a generator may be asked for, while it repeats itself."""


@dataclass(frozen=True)
class Loaded:
    """Rows of both sides before cleaning; `heldout` is None where the source has no such side."""

    train: list[Candidate]
    heldout: list[Candidate] | None
    quarantined: list[Quarantined] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What was recognised, for the summary."""
    frozen: list[Candidate] | None = None
    """Held-out rows of an earlier night, which go before whatever the source would hold out."""


def load(config: DataConfig) -> Loaded:
    """Rows of the configured source.

    Raises:
        DataError: with a subclass for each thing that can be wrong with a file.
    """
    source = config.source
    if isinstance(source, CalculatorSource):
        return _load_calculator(source, config.seed)
    if isinstance(source, ReasoningGymSource):
        return _load_reasoning_gym(source, config.seed)
    return _load_files(source)


def _load_calculator(source: CalculatorSource, seed: int) -> Loaded:
    train, heldout = calculator_problems(source.train_rows, source.heldout_rows, seed)
    return _generated(train, heldout, {"shape": "calculator"})


def _generated(train: list[Row], heldout: list[Row], facts: dict[str, Any]) -> Loaded:
    return Loaded([Candidate.of(r) for r in train], [Candidate.of(r) for r in heldout], facts=facts)


def _load_reasoning_gym(source: ReasoningGymSource, seed: int) -> Loaded:
    """Distinct problems of one generator; the held-out ones are drawn first."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.dataset not in DATASETS:
        raise DataError(
            f"data.source.dataset={source.dataset!r} is no reasoning-gym generator; choose from "
            f"{', '.join(sorted(DATASETS))}"
        )
    wanted = source.train_rows + source.heldout_rows
    try:
        made = reasoning_gym.create_dataset(
            source.dataset, size=SURPLUS * wanted, seed=seed, **source.options
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(
            f"data.source.options={source.options} does not suit the generator "
            f"{source.dataset!r}: {error}"
        ) from error
    rows = _distinct_rows(made, source.dataset, wanted)
    if len(rows) < wanted:
        raise DataError(
            f"the generator {source.dataset!r} made only {len(rows)} distinct problems; lower "
            f"data.source.train_rows={source.train_rows} or data.source.heldout_rows="
            f"{source.heldout_rows}, or widen data.source.options"
        )
    numeric = all(gold_parses("number", row.answer) is None for row in rows)
    kind = "number" if numeric else "text"
    rows = [row.model_copy(update={"answer_kind": kind}) for row in rows]
    facts = {"shape": f"reasoning_gym/{source.dataset}", "answer_kind": kind}
    return _generated(rows[source.heldout_rows :], rows[: source.heldout_rows], facts)


def _distinct_rows(made: Any, name: str, wanted: int) -> list[Row]:
    seen: set[str] = set()
    rows: list[Row] = []
    for index in range(len(made)):
        if len(rows) == wanted:
            break
        entry = made[index]
        key = prompt_key(entry["question"])
        if key in seen or entry["answer"] is None:
            continue
        seen.add(key)
        rows.append(
            Row(
                id=f"{name}-{index}",
                prompt=entry["question"],
                answer=str(entry["answer"]),
                source=f"reasoning_gym/{name}",
            )
        )
    return rows


def _load_files(source: FileSource) -> Loaded:
    train, quarantined, facts = _read_side(source, source.train, "train")
    if source.heldout is None:
        return Loaded(train, None, quarantined, facts)
    heldout, more, heldout_facts = _read_side(source, source.heldout, "heldout")
    both = {**facts, "heldout_shape": heldout_facts["shape"]}
    both["blank_lines"] = facts["blank_lines"] + heldout_facts["blank_lines"]
    return Loaded(train, heldout, quarantined + more, both)


def _read_side(
    source: FileSource, location: str, split: str
) -> tuple[list[Candidate], list[Quarantined], dict[str, Any]]:
    contents = read_location(location, split)
    if not contents.records:
        raise DataFileEmptyError(
            f"data.source.{split}={location!r} holds no row: {_why_empty(contents)}; expected one "
            "JSON object per line"
        )
    shape = recognise(contents.records, source.mapping, location)
    name = Path(location).name if Path(location).exists() else location
    rows = [read_candidate(record, shape, source, name) for record in contents.records]
    quarantined = [
        Quarantined(
            None, bad.line, f"unparseable_line: {bad.reason}", {"text": bad.text}, split, name
        )
        for bad in contents.bad_lines
    ]
    facts = {
        "shape": shape.name,
        "columns": shape.columns(),
        "blank_lines": len(contents.blank_lines),
        "answer_kind": source.answer_kind,
    }
    return rows, quarantined, facts


def _why_empty(contents: FileContents) -> str:
    if not contents.bad_lines:
        return "the file is empty"
    first = contents.bad_lines[0]
    return f"none of its {len(contents.bad_lines)} lines parses (line {first.line}: {first.reason})"


def read_location(location: str, split: str) -> FileContents:
    """Rows of a file, or of a public dataset id where no such file exists.

    Raises:
        DataFileMissingError: neither a file nor shaped like an id.
        DatasetLibraryMissingError: an id, and the library `datasets` is not installed.
        DatasetUnavailableError: an id that cannot be had from here.
    """
    path = Path(location)
    if path.is_dir():
        raise DataFileMissingError(
            f"data.source.{split}={location!r} is a folder; name the file in it"
        )
    if not path.exists():
        if _DATASET_ID.fullmatch(location) and path.suffix.lower() not in _FILE_SUFFIXES:
            return _read_public(location, split)
        raise DataFileMissingError(
            f"data.source.{split}={location!r}: no such file (looked in {Path.cwd().name}/); "
            "give a path relative to the working directory, or a public dataset id such as "
            "org/name"
        )
    reader: Callable[[Path], FileContents] = (
        read_parquet if path.suffix.lower() == ".parquet" else read_jsonl
    )
    return reader(path)


def _read_public(dataset_id: str, split: str) -> FileContents:
    """Rows of a public dataset, `org/name` or `org/name:configuration`; held-out is its test."""
    try:
        import datasets
    except ImportError as error:
        raise DatasetLibraryMissingError(
            f"data.source.{split}={dataset_id!r} is no file here, so it is read as a public "
            "dataset id, and the library `datasets` that loads those is not installed. Install "
            "it, or download the dataset's JSONL or Parquet file on a machine with a network and "
            f"set data.source.{split} to its path"
        ) from error
    name, _, configuration = dataset_id.partition(":")
    part = "train" if split == "train" else "test"
    try:
        rows = datasets.load_dataset(name, configuration or None, split=part)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DatasetUnavailableError(
            f"data.source.{split}={dataset_id!r} is no file here, and its split {part!r} cannot be "
            f"had as a public dataset: {error}. Check the name, or download the dataset's JSONL or "
            f"Parquet file on a machine with a network and set data.source.{split} to its path"
        ) from error
    return FileContents(tuple(Record(i, dict(row)) for i, row in enumerate(rows, start=1)))
