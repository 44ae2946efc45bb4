"""What became of each night: `runs/nights/<profile>.jsonl`, append-only.

The log is the only thing nights remember. A night that trained names what it took in and the
dataset it made; the next one goes on from there. A night that failed or was killed adds nothing
the next could build on, so it is simply done again.
"""

import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tasks.artifacts import ArtifactRecord
from tasks.artifacts.append_log import locked_log, read_log

FOLDER = "nights"
Outcome = Literal["started", "trained", "nothing new", "stopped", "skipped", "failed", "killed"]
DONE: frozenset[Outcome] = frozenset({"trained", "nothing new"})
"""A night that ended so is over; the others may be tried again."""


@dataclass(frozen=True)
class NightLine:
    """One line: a night that began, or how it ended."""

    outcome: Outcome
    day: str
    """The date on which the schedule meant it to start, as in 2027-03-28."""
    zone: str
    scheduled: bool
    """Whether the schedule started it, rather than a person."""
    reason: str = ""
    run_id: str | None = None
    flow_run_id: str | None = None
    new_rows: int | None = None
    intake: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    time_s: float = field(default_factory=time.time)

    @property
    def time(self) -> datetime:
        """When the line was written, UTC."""
        return datetime.fromtimestamp(self.time_s, UTC)

    def record(self, name: Literal["intake", "data"]) -> ArtifactRecord | None:
        """The record of what it took in, or of its dataset."""
        value = self.intake if name == "intake" else self.data
        return None if value is None else ArtifactRecord.model_validate(value)


class NightLog:
    """The nights of one profile."""

    def __init__(self, runs_dir: Path, profile: str) -> None:
        self.path = runs_dir / FOLDER / f"{profile.replace('.', '-')}.jsonl"

    def lines(self) -> list[NightLine]:
        """Every line, oldest first; a line cut off by a kill was never acted upon and is left out.

        Keys that a later version wrote are passed over.
        """
        known = set(NightLine.__dataclass_fields__)
        rows = read_log(self.path).rows
        return [NightLine(**{k: v for k, v in row.items() if k in known}) for row in rows]

    def append(self, line: NightLine) -> None:
        """Add a line; it is on the disk when this returns."""
        with locked_log(self.path) as log:
            log.append(asdict(line))

    def last_trained(self) -> NightLine | None:
        """The night the next one goes on from."""
        return next((line for line in reversed(self.lines()) if line.outcome == "trained"), None)

    def done_on(self, day: str) -> NightLine | None:
        """How the scheduled night of that day ended, if it is over."""
        for line in reversed(self.lines()):
            if line.scheduled and line.day == day and line.outcome in DONE:
                return line
        return None

    def last_done(self) -> NightLine | None:
        """The last night that was not skipped, broken off or failed."""
        return next((line for line in reversed(self.lines()) if line.outcome in DONE), None)


def night_logs(runs_dir: Path) -> list[NightLog]:
    """The log of every profile that had a night."""
    return [NightLog(runs_dir, path.stem) for path in sorted((runs_dir / FOLDER).glob("*.jsonl"))]
