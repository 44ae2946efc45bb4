"""A night as it happens: the facts it is judged by, what it takes in, how it ends.

The rules are in `flows.nightly.rules`, what is remembered in `flows.nightly.log`.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.context import FlowRunContext
from prefect.states import Cancelled, Completed

from configs.schema import PipelineConfig
from configs.time_zones import time_zone
from flows.alerts.send import Alert, send_alert
from flows.nightly.log import NightLine, NightLog, Outcome
from flows.nightly.rules import Night, may_start, night_slot
from flows.run_ends import NightSkippedError, NothingNewError, StoppedAfter
from flows.run_lock import RunLockedError
from tasks.artifacts import ArtifactRecord, hash_file
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.data.drop_folder import Intake, take_in
from tasks.data.stage import INTAKE
from tasks.events import Event
from tasks.tracking.promotion_ledger import PromotionLedger, Release, model_name

if TYPE_CHECKING:
    from flows.run import Run

SKIPPED = "Skipped"
"""Name of the state, of type Cancelled, in which a night that did not start ends."""
NOTHING_NEW: Outcome = "nothing new"
STILL_COUNTS = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.COMPLETED]
UNNAMED = ("CronSchedule", "IntervalSchedule", "RRuleSchedule")
logger = logging.getLogger(__name__)


@dataclass
class Tonight:
    """The night one run is."""

    night: Night
    log: NightLog
    last: NightLine | None = None
    """The last night that trained."""
    champion: Release | None = None
    intake: Intake = field(default_factory=lambda: Intake(None))
    data: ArtifactRecord | None = None
    new: int | None = None
    """Training rows the last night did not have; None on the first night."""
    message: str = ""
    """What there is to say about how it ended."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The block `night` of the run's summary."""

    def line(self, outcome: Outcome, run_id: str | None = None, reason: str = "") -> NightLine:
        """A line for the log."""
        return NightLine(
            outcome=outcome,
            day=self.night.day,
            zone=self.night.zone,
            scheduled=self.night.scheduled,
            reason=reason or self.message,
            run_id=run_id,
            flow_run_id=self.night.flow_run_id,
            new_rows=self.new,
            intake=_plain(self.intake.record),
            data=_plain(self.data),
        )


def _plain(record: ArtifactRecord | None) -> dict[str, Any] | None:
    return None if record is None else record.model_dump(mode="json")


def open_night(config: PipelineConfig, runs_dir: Path) -> Tonight:
    """Tonight, judged.

    Raises:
        NightSkippedError: it does not start; that is logged, and told where people must know.
    """
    night = facts_of_tonight(config)
    log = NightLog(runs_dir, config.profile)
    done = log.done_on(night.day)
    verdict = may_start(
        night,
        datetime.now(UTC),
        max_start_delay_s=config.nightly.max_start_delay_s,
        done=done.outcome if done is not None else None,
    )
    champion = PromotionLedger(runs_dir, model_name(config.profile)).champion()
    tonight = Tonight(night, log, log.last_trained(), champion)
    if not verdict.goes_on:
        raise skip(tonight, config, runs_dir, verdict.why, tell=verdict.alert)
    return tonight


def locked_out(config: PipelineConfig, runs_dir: Path, error: RunLockedError) -> NightSkippedError:
    """A night that finds another run at work in the folder is skipped, and people are told."""
    night = facts_of_tonight(config)
    return skip(Tonight(night, NightLog(runs_dir, config.profile)), config, runs_dir, str(error))


def skip(
    tonight: Tonight, config: PipelineConfig, runs_dir: Path, why: str, *, tell: bool = True
) -> NightSkippedError:
    """Log that tonight is skipped and tell people; returns the error that ends the run."""
    message = f"night {tonight.night.day} skipped: {why}"
    tonight.log.append(tonight.line("skipped", reason=why))
    logger.warning("%s", message)
    if tell:
        key = f"skipped:{config.profile}:{tonight.night.day}"
        title = f"{config.profile}: night {tonight.night.day} skipped"
        outcome = send_alert(config.alerts, Alert("skipped", title, message, key), runs_dir)
        for problem in outcome.problems:
            logger.warning("%s", problem)
    return NightSkippedError(message)


def facts_of_tonight(config: PipelineConfig) -> Night:
    """What Prefect knows of this flow run; without a schedule, the profile's zone and now."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None or not run.auto_scheduled:
        zone, now = config.nightly.timezone, datetime.now(UTC)
        day = now.astimezone(time_zone(zone)).date().isoformat()
        return Night(day, zone, now, flow_run_id=str(run.id) if run is not None else None)
    with get_client(sync_client=True) as client:
        return scheduled_night(client, client.read_flow_run(run.id), config.nightly.timezone)


def scheduled_night(client: SyncPrefectClient, run: FlowRun, default_zone: str) -> Night:
    """The night a scheduled flow run is, by its schedule's own zone and clock."""
    scheduled_at = run.expected_start_time or datetime.now(UTC)
    cron, zone = _cron_and_zone(client, run)
    zone = zone or default_zone
    return Night(
        day=night_slot(scheduled_at, zone, cron),
        zone=zone,
        scheduled_at=scheduled_at,
        scheduled=True,
        attempt=max(run.run_count, 1),
        newer_at=_newer(client, run, scheduled_at),
        flow_run_id=str(run.id),
    )


def _cron_and_zone(client: SyncPrefectClient, run: FlowRun) -> tuple[str | None, str | None]:
    """Of the schedule that started the run; None where it is gone or no cron."""
    assert run.deployment_id is not None
    for found in client.read_deployment_schedules(run.deployment_id):
        if same_schedule((found.id, found.slug), maker(run)):
            cron = found.schedule.cron if isinstance(found.schedule, CronSchedule) else None
            return cron, getattr(found.schedule, "timezone", None)
    return None, None


def _newer(client: SyncPrefectClient, run: FlowRun, scheduled_at: datetime) -> datetime | None:
    """When the newest later run of the schedule was due, if one is due by now."""
    assert run.deployment_id is not None
    later = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=STILL_COUNTS)),
            expected_start_time=FlowRunFilterExpectedStartTime(
                after_=scheduled_at + timedelta(microseconds=1), before_=datetime.now(UTC)
            ),
        )
    )
    ours = [r for r in later if r.auto_scheduled and same_schedule(maker(r), maker(run))]
    return max((r.expected_start_time for r in ours if r.expected_start_time), default=None)


Maker = tuple[UUID | None, str | None]
"""Id and name of the schedule that made a run."""


def maker(run: FlowRun) -> Maker:
    """The schedule that made a run; a schedule without a slug is shown by its class: no name."""
    made_by = run.created_by
    if made_by is None:
        return None, None
    name = made_by.display_value
    return made_by.id, None if name in UNNAMED else name


def same_schedule(one: Maker, other: Maker) -> bool:
    """The same id, or the same name: deploying anew gives a schedule another id."""
    return any(mine is not None and mine == theirs for mine, theirs in zip(one, other, strict=True))


@contextlib.contextmanager
def as_night(run: "Run") -> Iterator[None]:
    """Log how the night of `run` ends; by day, nothing. Having nothing new is no failure."""
    tonight = run.night
    if tonight is None:
        yield
        return
    context, night = run.context, tonight.night
    tonight.facts |= {
        "day": night.day,
        "zone": night.zone,
        "scheduled": night.scheduled,
        "scheduled_at": night.scheduled_at.isoformat(),
        "attempt": night.attempt,
    }
    context.night = tonight.facts
    tonight.log.append(tonight.line("started", context.run_id))
    outcome: Outcome = "killed"
    try:
        _take_in(run, tonight)
        yield
        outcome = "trained"
    except NothingNewError as error:
        outcome, tonight.message = NOTHING_NEW, str(error)
        context.tell(Event("note", message=str(error)))
    except StoppedAfter:
        outcome = "stopped"
        raise
    except Exception as error:
        outcome, tonight.message = "failed", str(error)
        raise
    finally:
        sft = context.outcomes.get("sft")
        reference = sft.record.sha256 if sft is not None and sft.record is not None else None
        tonight.facts |= {"outcome": outcome, "kl_reference_sha256": reference}
        tonight.log.append(tonight.line(outcome, context.run_id))


def _take_in(run: "Run", tonight: Tonight) -> None:
    """Take in what lies in the drop folder, and freeze the held-out set if that is due."""
    context, settings = run.context, run.context.config.nightly
    head = tonight.last.record("intake") if tonight.last is not None else None
    tonight.intake = take_in(
        Path(settings.drop_folder) if settings.drop_folder is not None else None,
        context.store,
        head=head,
        heldout=_heldout_to_freeze(tonight, head),
    )
    taken = tonight.intake
    for left in taken.left:
        context.tell(Event("warning", "data", f"drop folder: {left.name} left: {left.reason}"))
    tonight.facts |= {
        "drop_folder": settings.drop_folder,
        "dropped_lines": taken.new,
        "dropped_files": dict(taken.counts),
        "left_files": {left.name: left.reason for left in taken.left},
        "intake_sha256": taken.record.sha256 if taken.record is not None else None,
    }
    if settings.drop_folder is not None:
        names = ", ".join(f"{name} ({count})" for name, count in taken.counts.items())
        said = f"drop folder {settings.drop_folder}: {taken.new} new lines"
        context.tell(Event("note", "data", f"{said}{f' in {names}' if names else ''}"))


def _heldout_to_freeze(tonight: Tonight, head: ArtifactRecord | None) -> Path | None:
    """Held-out rows of the last night, else of the champion; None where they are frozen already.

    Raises:
        ArtifactCorruptError: they are gone or were changed.
    """
    if head is not None and head.meta.get("heldout_sha256") is not None:
        return None
    data = tonight.last.record("data") if tonight.last is not None else None
    if data is None and tonight.champion is not None:
        data = tonight.champion.records.get("data")
    if data is None:
        return None
    path, expected = data.path / "heldout.jsonl", data.meta.get("heldout_sha256")
    try:
        found = hash_file(path)
    except OSError as error:
        found = str(error)
    if found != expected:
        raise ArtifactCorruptError(
            f"{path} is gone or was changed, and releases are measured on it; bring it back from a "
            "backup of runs/store, or rename the profile to begin a new chain of nights",
            path,
        )
    return path


def taken_in(run: "Run") -> dict[str, ArtifactRecord]:
    """What data prep is given beside its source: at night, what was taken in so far."""
    record = run.night.intake.record if run.night is not None else None
    return {INTAKE: record} if record is not None else {}


def end_state(run: "Run") -> dict[str, Any] | State[Any]:
    """What the flow returns: the summary, in a state that says so where a night had nothing new."""
    if run.night is None or run.night.facts.get("outcome") != NOTHING_NEW:
        return run.summary
    return Completed(message=run.night.message, data=run.summary)


def skipped_state(error: NightSkippedError) -> State[Any]:
    """What the flow returns for a night that did not start."""
    return Cancelled(name=SKIPPED, message=str(error))
