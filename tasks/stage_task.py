"""What the thin tasks share: caching by content, the supervised process, and its reporting."""

import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from tasks.artifacts import ArtifactRecord
from tasks.artifacts.store import StageFolder
from tasks.events import Event
from tasks.run_context import RunContext, current_run
from tasks.stage_process import StageRequest
from tasks.stages import may_go_online, slice_values, stage_spec
from tasks.supervise import (
    Callbacks,
    Progress,
    StageFailedError,
    stage_environment,
    supervise,
)
from tasks.tracking.operations import RunStatus
from tasks.tracking.stage_log import StageLog

RETRIES = 2
RETRY_DELAYS_S = [2, 30]
ARTIFACT_PERIOD_S = 5.0
MetricLines = list[dict[str, Any]]


def cache_key(context: TaskRunContext, parameters: Mapping[str, Any]) -> str:
    """Prefect's key of a stage task: our content key."""
    return f"{parameters['stage']}-{parameters['key']}"


def worth_retrying(task: Any, run: TaskRun, state: State[Any]) -> bool:
    """Retry a stage whose process was killed or lost a peer; bad data stays bad."""
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, StageFailedError) and failure.retryable


def task_options(stage: str) -> dict[str, Any]:
    """How every stage task is declared."""
    return {
        "name": stage,
        "persist_result": True,
        "result_serializer": "json",
        "retries": RETRIES,
        "retry_delay_seconds": RETRY_DELAYS_S,
        "retry_condition_fn": worth_retrying,
        "cache_policy": CacheKeyFnPolicy(cache_key_fn=cache_key),
        "task_run_name": stage,
        "tags": {"stage"},
    }


class StageReporting:
    """Passes what a stage says on to the listener, MLflow and Prefect's progress artifact."""

    def __init__(self, run: RunContext, stage: str, log: StageLog) -> None:
        self._run, self._stage, self._log = run, stage, log
        self._artifact: UUID | None = None
        self._shown_s = float("-inf")
        self._sent_s = time.monotonic()
        self._held: MetricLines = []

    def callbacks(self) -> Callbacks:
        """What the supervisor calls."""
        return Callbacks(progress=self.progress, metrics=self.metrics)

    def progress(self, said: Progress) -> None:
        """Tell the listener at once, Prefect every few seconds."""
        event = Event("progress", self._stage, said.message, done=said.done, total=said.total)
        self._run.tell(event)
        now_s = time.monotonic()
        if now_s - self._shown_s < ARTIFACT_PERIOD_S or said.total <= 0:
            return
        self._shown_s = now_s
        self._show(100.0 * said.done / said.total, said.message)

    def _show(self, percent: float, message: str) -> None:
        percent = min(100.0, max(0.0, percent))
        if self._artifact is None:
            self._artifact = self._run.in_prefect(
                create_progress_artifact,
                progress=percent,
                key=f"{self._stage}-progress",
                description=message,
            )
        else:
            self._run.in_prefect(update_progress_artifact, self._artifact, percent, message)

    def metrics(self, lines: MetricLines) -> None:
        """Tell the listener at once, MLflow in batches."""
        for line in lines:
            event = Event("metrics", self._stage, step=line["step"], values=line["values"])
            self._run.tell(event)
        self._held += lines
        if time.monotonic() - self._sent_s >= ARTIFACT_PERIOD_S:
            self.flush()

    def flush(self) -> None:
        """Send the metrics still held."""
        self._sent_s = time.monotonic()
        if self._held:
            self._log.metrics(self._held)
        self._held = []

    def table(self, record: ArtifactRecord, wall_s: float) -> None:
        """Leave the result as a table artifact."""
        facts = {"kind": record.kind, "sha256": record.sha256, "uri": record.uri}
        row = {**facts, "wall_s": f"{wall_s:.1f}"}
        self._run.in_prefect(create_table_artifact, table=[row], key=f"{self._stage}-result")


def run_stage(stage: str, key: str, inputs: Mapping[str, Any], reuse: bool) -> dict[str, Any]:
    """The body of every stage task: `reuse` takes the verified output under `key`, else work."""
    run = current_run()
    start_s = time.monotonic()
    try:
        folder = StageFolder(run.store, stage, key)
        if reuse and (finished := folder.read_mark()) is not None:
            return finished.record.model_dump(mode="json")  # the flow has just verified it
        return _run_logged(run, folder, inputs).model_dump(mode="json")
    finally:
        run.body_s += time.monotonic() - start_s


def _run_logged(run: RunContext, folder: StageFolder, inputs: Mapping[str, Any]) -> ArtifactRecord:
    """Run the stage inside a nested MLflow run that says how it ended."""
    stage = folder.stage
    records = {name: ArtifactRecord.model_validate(value) for name, value in inputs.items()}
    log = StageLog(run.tracker, stage, run.config.profile)
    log.open(records, {"cached": "false", "cache_key": folder.key})
    log.params(slice_values(run.config, stage_spec(stage).slice))
    status: RunStatus = "KILLED"
    reporting = StageReporting(run, stage, log)
    try:
        record = _work(run, folder, records, reporting)
        status = "FINISHED"
        return record
    except Exception:
        status = "FAILED"
        raise
    finally:
        reporting.flush()
        log.close(status)


def _work(
    run: RunContext,
    folder: StageFolder,
    inputs: Mapping[str, ArtifactRecord],
    reporting: StageReporting,
) -> ArtifactRecord:
    """Run the stage under its supervisor, mark its output whole, and report it."""
    spec = stage_spec(folder.stage)
    request = StageRequest(
        stage=spec.name,
        entry=spec.entry,
        slice=(*spec.slice, *spec.shown),
        config=run.config.model_dump(mode="json"),
        inputs=dict(inputs),
        out_dir=str(folder.path),
        result=str(folder.control / "result.json"),
        error=str(folder.control / "error.json"),
        facts=run.facts,
    )
    run.sampler.mark()
    start_s = time.monotonic()
    environment = stage_environment(
        f"{run.run_id}:{spec.name}", offline=not may_go_online(run.config)
    )
    record = supervise(request, folder, run.config.supervision, reporting.callbacks(), environment)
    wall_s = time.monotonic() - start_s
    log = StageLog(run.tracker, spec.name, run.config.profile)
    finished = folder.finish(
        record,
        wall_s=wall_s,
        peak_tree_bytes=run.sampler.peak_since_mark,
        mlflow_run_id=run.tracker.run_id(spec.name),
    )
    reporting.flush()
    log.output(folder, finished, run.config.tracking.max_artifact_mb * 1e6)
    reporting.table(record, wall_s)
    return record
