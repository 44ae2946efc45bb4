"""Whether a night has something new to train on, and what it starts from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from configs.schema import PipelineConfig
from flows.nightly.rules import enough_new
from flows.nightly.run import Tonight
from flows.run_ends import NothingNewError
from tasks.artifacts import ArtifactRecord
from tasks.data.new_rows import new_rows
from tasks.events import Event
from tasks.sft.start import INPUT as START
from tasks.tracking.promotion_ledger import Release

if TYPE_CHECKING:
    from flows.run import Run


def starting_point(run: "Run", data: ArtifactRecord) -> dict[str, ArtifactRecord]:
    """What SFT is given beside the data: at night, the release it starts from, if any.

    Raises:
        NothingNewError: there is too little new to train on.
    """
    tonight = run.night
    if tonight is None:
        return {}
    tonight.data = data
    tonight.facts |= {
        "heldout_sha256": data.meta.get("heldout_sha256"),
        "heldout_frozen": data.meta.get("heldout_frozen"),
    }
    if given_up := data.meta.get("heldout_given_up"):
        message = (
            f"the source would hold out {given_up} other rows now; the held-out set of the first "
            "night stays"
        )
        run.context.tell(Event("warning", "data", message))
    _judge_newness(run, tonight, data)
    start = choose_start(run.context.config, tonight.champion)
    tonight.facts["starts_from"] = start.to_json()
    run.context.tell(Event(start.event, "sft", start.sentence))
    return {START: start.record} if start.record is not None else {}


def _judge_newness(run: "Run", tonight: Tonight, data: ArtifactRecord) -> None:
    """Count the rows the last night did not have.

    Raises:
        NothingNewError: they are too few.
    """
    last = tonight.last.record("data") if tonight.last is not None else None
    if last is None:
        return
    try:
        found = new_rows(data, last)
    except OSError as error:
        message = f"cannot compare with the last night's rows ({error}); it trains on all"
        run.context.tell(Event("warning", "data", message))
        return
    bands = run.context.config.data.rl_bands
    tonight.new = sum(found.values())
    usable = sum(count for band, count in found.items() if not bands or band in bands)
    tonight.facts |= {"new_rows": tonight.new, "new_rows_rl_draws_from": usable}
    verdict = enough_new(tonight.new, usable, run.context.config.nightly.min_new_rows)
    if not verdict.goes_on:
        raise NothingNewError(verdict.why)


@dataclass(frozen=True)
class Start:
    """What a night starts from."""

    asked: str
    """`nightly.start_from`."""
    what: str
    """`base`, `snapshot` or `champion`: what it is in the end."""
    record: ArtifactRecord | None = None
    release: str | None = None
    why_not: str = ""
    """Why it is not what was asked for."""

    @property
    def event(self) -> Literal["note", "warning"]:
        """Falling back is worth a warning."""
        return "warning" if self.why_not else "note"

    @property
    def sentence(self) -> str:
        """For the log."""
        if self.record is None:
            but = f" (nightly.start_from={self.asked}, but {self.why_not})" if self.why_not else ""
            return f"starts from base: SFT learns all rows anew, and is the KL reference{but}"
        part = "its SFT snapshot" if self.what == "snapshot" else "its policy"
        return (
            f"starts from {self.what}: {part}, weights {self.record.sha256[:12]}, of "
            f"{self.release}; that is the KL reference"
        )

    def to_json(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "asked": self.asked,
            "what": self.what,
            "release": self.release,
            "sha256": self.record.sha256 if self.record is not None else None,
            "why_not": self.why_not,
        }


def choose_start(config: PipelineConfig, champion: Release | None) -> Start:
    """What the night starts from; base where there is no champion, or it names no such weights."""
    asked = config.nightly.start_from
    if asked == "base":
        return Start(asked, "base")
    if champion is None:
        return Start(asked, "base", why_not="there is no champion yet")
    record = champion.records.get("rl" if asked == "champion" else "sft")
    if record is None:
        return Start(asked, "base", why_not=f"{champion.name} does not say where its weights are")
    return Start(asked, asked, record, champion.name)
