"""What an intake adds to the source: dropped rows, and held-out rows that are frozen."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.schema.data import DataConfig, FileSource, Mapping
from tasks.artifacts import ArtifactRecord
from tasks.data.candidate import Candidate, Quarantined
from tasks.data.drop_folder import DropLine, by_file, heldout_file, read_lines
from tasks.data.errors import UnknownShapeError
from tasks.data.jsonl import Record, parse_line
from tasks.data.shapes import Shape, read_candidate, recognise
from tasks.data.sources import Loaded
from tasks.environments.row import read_rows

PREFIX = "drop:"
"""Stands before the file's name in the `source` of a dropped row."""


def with_intake(loaded: Loaded, intake: ArtifactRecord, config: DataConfig) -> Loaded:
    """`loaded` with what the intake holds; a row that cannot be read is set aside with the reason.

    Raises:
        IntakeGoneError: the intake is not whole.
    """
    lines = read_lines(intake)
    source = _read_as(loaded, config)
    rows: list[Candidate] = []
    quarantined: list[Quarantined] = []
    for name, group in by_file(lines).items():
        rows += _rows_of(name, group, source, quarantined)
    heldout = heldout_file(intake)
    frozen = None if heldout is None else [Candidate.of(row) for row in read_rows(heldout)]
    return replace(
        loaded,
        train=[*loaded.train, *rows],
        frozen=frozen,
        quarantined=[*loaded.quarantined, *quarantined],
        facts={**loaded.facts, "dropped_lines": len(lines)},
    )


def _read_as(loaded: Loaded, config: DataConfig) -> FileSource:
    """How dropped files are read: as the source's own, or by recognition where it is generated."""
    if isinstance(config.source, FileSource):
        return config.source
    kind: Any = loaded.train[0].answer_kind if loaded.train else "number"
    return FileSource(train="", answer_kind=kind)


def _rows_of(
    name: str, lines: Sequence[DropLine], source: FileSource, quarantined: list[Quarantined]
) -> list[Candidate]:
    """Rows of one dropped file."""
    records = []
    for line in lines:
        try:
            if line.problem:
                raise ValueError(line.problem)
            records.append(Record(line.line, parse_line(line.text.encode())))
        except ValueError as error:
            reason = f"unparseable_line: {PREFIX}{name}: {error}"
            quarantined.append(
                Quarantined(
                    None, line.line, reason, {"text": line.text}, "train", f"{PREFIX}{name}"
                )
            )
    if not records:
        return []
    try:
        shape = _shape(records, source.mapping, name)
    except UnknownShapeError as error:
        quarantined += [
            Quarantined(
                None, r.line, f"unknown_shape: {error}", dict(r.values), "train", f"{PREFIX}{name}"
            )
            for r in records
        ]
        return []
    rows = [read_candidate(record, shape, source, f"{PREFIX}{name}") for record in records]
    return [replace(row, dropped=True) for row in rows]


def _shape(records: Sequence[Record], mapping: Mapping, name: str) -> Shape:
    """The shape the source's mapping gives, or the one the file itself shows."""
    try:
        return recognise(records, mapping, f"{PREFIX}{name}")
    except UnknownShapeError:
        return recognise(records, Mapping(), f"{PREFIX}{name}")
