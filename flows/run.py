"""One run of the pipeline: folders, lock, MLflow parent run, and how a stage is reused or run."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.tasks import Task

from configs.schema import PipelineConfig
from deployment.service_files import runs_folder
from flows.alerts.of_runs import run_alerts
from flows.alerts.send import Sending, start_alert
from flows.flow_log import FlowLog
from flows.lineage.page import write_run_lineage
from flows.nightly.reconcile import reconcile_at_start
from flows.nightly.run import Tonight, as_night, locked_out, open_night
from flows.promotion.releases import follow, ready_ledger
from flows.report.page import write_report
from flows.run_ends import StoppedAfter
from flows.run_id import new_run_id
from flows.run_lock import RunLock, RunLockedError
from flows.run_owner import sign
from flows.run_parent import close_parent, open_parent
from flows.summary import build_summary, link_latest, write_summary
from tasks.artifacts import ArtifactRecord, write_json
from tasks.artifacts.errors import ArtifactCorruptError, ArtifactWriteError
from tasks.artifacts.machine import Machine, measure_machine
from tasks.artifacts.provenance import GitState, git_state
from tasks.artifacts.store import StageFolder, Verdict
from tasks.cache_keys import StageKey, explain, remember, stage_key
from tasks.events import Event, Listener, ignore
from tasks.process_tree import PeakSampler
from tasks.run_context import RunContext, StageOutcome, StageStatus, entered
from tasks.stages import STAGES, stage_spec
from tasks.tracking.operations import RunStatus
from tasks.tracking.stage_log import StageLog
from tasks.tracking.tracker import open_tracker


class UnknownStageError(ValueError):
    """`force` or `stop_after` names a stage there is not."""


@dataclass(frozen=True)
class Launch:
    """What the command line hands to the flow beside its parameters."""

    run_id: str
    runs_dir: Path
    listener: Listener = ignore
    started_s: float = field(default_factory=time.monotonic)
    prefect_s: float = 0.0
    """Time Prefect took before the flow began."""
    locked: bool = False
    """Whether the launcher holds the run lock already."""


LAUNCH: ContextVar[Launch | None] = ContextVar("rl_pipeline_launch", default=None)


def _launch(config: PipelineConfig) -> Launch:
    """The launcher's wishes; a run that a Prefect worker started takes them from its environment.

    Its progress goes to the flow run's own log, which `--watch` and Prefect's pages show.
    """
    if (launch := LAUNCH.get()) is not None:
        return launch
    return Launch(new_run_id(config.profile), runs_folder(), FlowLog(get_run_logger()))


def check_stages(names: Sequence[str]) -> None:
    """Refuse names of stages there are not."""
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise UnknownStageError(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")


class Run:
    """The flow's handle on its run."""

    def __init__(
        self, context: RunContext, machine: Machine, git: GitState, launch: Launch
    ) -> None:
        self.context = context
        self.machine = machine
        self.git = git
        self.launch = launch
        self.force: frozenset[str] = frozenset()
        self.stop_after: str | None = None
        self.night: Tonight | None = None
        """The night this run is; None by day."""
        self.summary: dict[str, Any] = {}

    def stage(self, name: str, task: Task[Any, Any], **inputs: ArtifactRecord) -> ArtifactRecord:
        """Reuse the stage's verified output, or run it; returns its record.

        Raises:
            StageFailedError: it ended without a result.
            StoppedAfter: it is the stage the run was asked to stop after.
        """
        context = self.context
        start_s = time.monotonic()
        try:
            key = stage_key(stage_spec(name), context.config, inputs)
            folder = StageFolder(context.store, name, key.sha256)
            verdict = self._look(folder, key)
            record = self._call(task, folder, inputs, reuse=verdict.finished is not None)
        except BaseException as error:
            status: StageStatus = "failed" if isinstance(error, Exception) else "cancelled"
            wall_s = time.monotonic() - start_s
            context.outcomes[name] = StageOutcome(name, status, False, wall_s, error=str(error))
            context.tell(Event("stage_failed", name, str(error)))
            raise
        self._done(folder, key, verdict, record, inputs, start_s)
        if name == self.stop_after:
            raise StoppedAfter(name)
        return record

    def _look(self, folder: StageFolder, key: StageKey) -> Verdict:
        """Verify the output under the key; say whether and why the stage runs."""
        context, stage = self.context, key.stage
        if stage in self.force:
            folder.discard()
            verdict, why = Verdict(None), "forced"
        else:
            verdict = folder.verify()
            why = verdict.reason if verdict.corrupt else ""
        if verdict.finished is not None:
            message = "reused: nothing it depends on changed, its files were re-hashed"
            context.tell(Event("stage_reused", stage, message))
            return verdict
        if verdict.corrupt:
            folder.reopen(verdict.corrupt)
            context.tell(Event("warning", stage, f"{stage}: {why}; it is made anew"))
        why = why or explain(context.store, stage, key.parts)
        remember(folder, key, context.store, finished=False)
        context.tell(Event("stage_started", stage, why))
        return verdict

    def _call(
        self,
        task: Task[Any, Any],
        folder: StageFolder,
        inputs: dict[str, ArtifactRecord],
        *,
        reuse: bool,
    ) -> ArtifactRecord:
        """Call the Prefect task; its persisted result counts only for a verified output."""
        context = self.context
        configured = task.with_options(
            refresh_cache=not reuse,
            result_storage=(context.runs_dir / "prefect" / "results").resolve(),
        )
        plain = {name: record.model_dump(mode="json") for name, record in inputs.items()}
        context.body_s, start_s = 0.0, time.monotonic()
        state = cast(
            State[Any],
            configured(folder.stage, folder.key, plain, reuse, return_state=True),
        )
        context.prefect_s += time.monotonic() - start_s - context.body_s
        return ArtifactRecord.model_validate(state.result())

    def _done(
        self,
        folder: StageFolder,
        key: StageKey,
        verdict: Verdict,
        record: ArtifactRecord,
        inputs: dict[str, ArtifactRecord],
        start_s: float,
    ) -> None:
        """Keep the outcome, tell the listener, and log a reused stage to MLflow."""
        context, cached = self.context, verdict.finished is not None
        finished = verdict.finished or folder.read_mark()
        if finished is None:
            raise ArtifactCorruptError(
                f"{folder.control / 'finished.json'} is gone right after stage {key.stage} wrote "
                "it; is another program cleaning the runs folder? Run again",
                folder.control,
            )
        if cached:
            log = StageLog(context.tracker, key.stage, context.config.profile)
            tags = {"cached": "true", "cache_key": key.sha256}
            if finished.mlflow_run_id:
                tags["made_by_run"] = finished.mlflow_run_id
            log.open(inputs, tags)
            log.output(folder, finished, context.config.tracking.max_artifact_mb * 1e6)
            log.close("FINISHED")
        remember(folder, key, context.store, finished=True)
        wall_s = time.monotonic() - start_s
        context.outcomes[key.stage] = StageOutcome(
            key.stage,
            "completed",
            cached,
            wall_s,
            record,
            None,
            finished.wall_s,
            finished.peak_tree_bytes,
        )
        write_json(context.run_dir / "records.json", self.records())
        context.tell(Event("stage_finished", key.stage, record.uri))

    def records(self) -> dict[str, Any]:
        """Records of the stages done so far."""
        return {s: r.model_dump(mode="json") for s, r in self.context.records().items()}


@contextlib.contextmanager
def open_run(
    config: PipelineConfig,
    *,
    force: Sequence[str] = (),
    stop_after: str | None = None,
    nightly: bool = False,
) -> Iterator[Run]:
    """Open a run: lock, folder, memory sampler, MLflow parent; close it whatever happens.

    Raises:
        RunLockedError: another run uses the folder.
        NightSkippedError: a night does not start: too late, already done, or another run goes on.
        LedgerError: the profile's promotion ledger cannot be relied on.
        UnknownStageError: `force` or `stop_after` names no stage.
    """
    check_stages([*force, *([stop_after] if stop_after else [])])
    launch = _launch(config)
    night = open_night(config, launch.runs_dir) if nightly else None
    run_dir = launch.runs_dir / launch.run_id
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "config.json", config.model_dump(mode="json"))
    sign(run_dir, flow_run.get_id())
    with contextlib.ExitStack() as stack:
        if not launch.locked:
            stack.enter_context(_lock(launch, config, nightly=nightly))
        run = _new_run(config, launch, stack.enter_context(PeakSampler()))
        run.force, run.stop_after, run.night = frozenset(force), stop_after, night
        stack.enter_context(entered(run.context))
        if not launch.locked:
            reconcile_at_start(run.context)
        ledger = ready_ledger(launch.runs_dir, config.profile)
        open_parent(run.context, run.git)
        follow(run.context, ledger)
        status: RunStatus = "KILLED"
        failure: Exception | None = None
        try:
            run.context.tell(Event("run_started", message=launch.run_id))
            with contextlib.suppress(StoppedAfter), as_night(run):
                yield run
            status = "FINISHED"
        except Exception as error:
            status, failure = "FAILED", error
            raise
        finally:
            _close(run, status, failure)


def _lock(launch: Launch, config: PipelineConfig, *, nightly: bool) -> RunLock:
    """The run's lock, held; a night that finds another run at work is skipped."""
    try:
        return RunLock(launch.runs_dir, launch.run_id).acquire()
    except RunLockedError as error:
        if not nightly:
            raise
        raise locked_out(config, launch.runs_dir, error) from error


def _new_run(config: PipelineConfig, launch: Launch, sampler: PeakSampler) -> Run:
    git = git_state()
    tracker = open_tracker(
        launch.runs_dir,
        launch.runs_dir / launch.run_id,
        config.tracking.experiment,
        config.tracking.uri,
    )
    context = RunContext(config, launch.run_id, launch.runs_dir, tracker, sampler, launch.listener)
    context.prefect_s = launch.prefect_s
    return Run(context, measure_machine(), git, launch)


def _close(run: Run, status: RunStatus, failure: Exception | None) -> None:
    """Write summary and report, log them, close MLflow's run; what it does not take is kept.

    Alerts go out meanwhile; who did not take one is a warning of the run. A run that was told to
    stop leaves no report: whoever stopped it does not wait long (`rl-pipeline report` writes it).
    """
    context = run.context
    context.tracker.retry()
    told = len(context.warnings)
    sending = _start_alerts(run, status, failure)  # before the disk is asked for anything
    try:
        run.summary = write_summary(context, run.machine, run.git, run.launch.started_s, status)
        link_latest(context.runs_dir, context.run_id)
        try:
            if status != "KILLED":
                _report(context)
        finally:
            close_parent(context, run.summary, status)
    finally:
        for problem in (p for alert in sending for p in alert.wait().problems):
            context.tell(Event("warning", message=problem))
    if len(context.warnings) > told:
        run.summary = write_summary(context, run.machine, run.git, run.launch.started_s, status)
    context.tell(Event("run_finished", message=str(context.run_dir / "summary.json")))


def _start_alerts(run: Run, status: RunStatus, failure: Exception | None) -> list[Sending]:
    context, config = run.context, run.context.config.alerts
    wall_s = time.monotonic() - run.launch.started_s
    summary = build_summary(context, run.machine, run.git, wall_s, status)
    wanted = run_alerts(config, summary, failure)
    return [start_alert(config, alert, context.runs_dir) for alert in wanted]


def _report(context: RunContext) -> None:
    """Write report and lineage; a full disk or a figure they cannot take must not end the run."""
    try:
        write_report(context.run_dir)
        write_run_lineage(context.runs_dir, context.run_dir)
    except (ArtifactWriteError, TemplateError) as error:
        context.tell(Event("warning", message=f"no report: {error}"))
