"""Brings what Prefect, MLflow and the night log say back to what is true after a crash.

A killed process cannot say that it ended. Whoever comes next says it: every run at its start, and
`rl-pipeline reconcile`. An owner is first seen to be dead and only then is the state read: a run
that completed and was slow to exit is never called crashed.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import psutil
from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Crashed

from configs.load import ConfigError, load_config
from configs.schema import PipelineConfig
from flows.alerts.send import Alert, send_alert
from flows.nightly.log import NightLine, night_logs
from flows.run_owner import Owner, owners
from tasks.events import Event
from tasks.run_context import RunContext
from tasks.tracking.reconcile import close_orphans
from tasks.tracking.tracker import open_tracker

FLOW = "rl-pipeline"
OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
PENDING_LIMIT = timedelta(minutes=10)
"""A run that has been about to start for so long lost its worker on the way."""
PID_SLACK = timedelta(minutes=1)
"""A process that began this much after the flow run was running took over a pid that was free."""
MAX_ATTEMPTS = 3
"""Times a night is started in all, where `resume` starts it again."""
logger = logging.getLogger(__name__)

Liveness = Literal["lives", "dead", "unknown"]


@dataclass(frozen=True)
class Settled:
    """One flow run whose state was put right."""

    flow_run_id: str
    name: str
    state: str
    why: str
    run_id: str | None = None


@dataclass
class Report:
    """What was put right."""

    settled: list[Settled] = field(default_factory=list)
    resumed: list[Settled] = field(default_factory=list)
    nights: list[NightLine] = field(default_factory=list)
    mlflow_closed: int = 0
    unknown: list[str] = field(default_factory=list)
    """Flow runs whose owner nobody knows here, another machine's perhaps: left as they are."""

    @property
    def empty(self) -> bool:
        """Whether all was right already."""
        return not (self.settled or self.resumed or self.nights or self.mlflow_closed)


def reconcile(runs_dir: Path, client: SyncPrefectClient | None, *, resume: bool = False) -> Report:
    """Put right what dead owners left open; twice changes nothing more.

    Args:
        runs_dir: folder of runs.
        client: of the Prefect server; None leaves Prefect alone.
        resume: start nights again that crashed, up to `MAX_ATTEMPTS` times in all.
    """
    report = Report()
    known = owners(runs_dir)
    dead = [owner for owner in known if not owner.lives]
    if client is not None:
        _settle_flow_runs(client, known, report)
        if resume:
            _resume(client, report)
    _close_nights(runs_dir, {owner.run_id for owner in dead}, report)
    _close_mlflow(runs_dir, dead, report)
    for settled in report.settled:
        if settled.state != "Cancelled":
            _tell(runs_dir, settled)
    return report


def reconcile_at_start(context: RunContext) -> None:
    """Before a worker's run begins; that the server does not answer now does not stop the run."""
    try:
        with get_client(sync_client=True) as client:
            report = reconcile(context.runs_dir, client)
    except HTTPError as error:
        context.tell(Event("warning", message=f"crashed runs were not looked for: {error}"))
        return
    for settled in report.settled:
        message = f"flow run {settled.name} is now {settled.state}: {settled.why}"
        context.tell(Event("note", message=message))


def liveness(run: FlowRun, owner: Owner | None, now: datetime) -> Liveness:
    """Whether the process of an open flow run lives.

    What the run wrote down itself counts first, unless it is of an earlier attempt: the worker has
    another pid for this one. A bare pid counts only where its process can be the run's.
    """
    state, pid = run.state, run.infrastructure_pid
    if state is None:
        return "unknown"
    if owner is not None and pid in (None, owner.tags["owner.pid"]):
        return "lives" if owner.lives else "dead"
    slack = PENDING_LIMIT if state.is_pending() else PID_SLACK
    if pid is not None and pid.isdigit():
        return _pid_liveness(int(pid), state.timestamp + slack)
    return "dead" if state.is_pending() and now - state.timestamp > PENDING_LIMIT else "unknown"


def _pid_liveness(pid: int, latest: datetime) -> Liveness:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return "dead"
        began = datetime.fromtimestamp(process.create_time(), UTC)
    except psutil.NoSuchProcess:
        return "dead"
    return "dead" if began > latest else "lives"


def _settle_flow_runs(client: SyncPrefectClient, known: Iterable[Owner], report: Report) -> None:
    by_flow_run = {o.flow_run_id: o for o in known if o.flow_run_id is not None}
    for run in open_flow_runs(client):
        owner = by_flow_run.get(str(run.id))
        alive = liveness(run, owner, datetime.now(UTC))
        if alive == "unknown":
            report.unknown.append(str(run.id))
        elif alive == "dead" and (settled := settle(client, run.id, owner)) is not None:
            report.settled.append(settled)


def open_flow_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Flow runs of the pipeline that occupy a slot."""
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN))
        ),
    )


def settle(client: SyncPrefectClient, flow_run_id: UUID, owner: Owner | None) -> Settled | None:
    """Give a flow run whose owner is dead its last state; None where it has one by now."""
    try:
        run = client.read_flow_run(flow_run_id)  # read anew: nobody is left to change it
    except ObjectNotFound:
        return None
    if run.state is None or run.state.type not in OPEN:
        return None
    why = f"its process is gone{f' (run {owner.run_id})' if owner is not None else ''}"
    cancelling = run.state.is_cancelling()
    state: State[Any] = (
        Cancelled(message=f"cancelled; {why}") if cancelling else Crashed(message=why)
    )
    client.set_flow_run_state(flow_run_id, state)
    now = client.read_flow_run(flow_run_id)
    if now.state is None or now.state.type is not state.type:
        return None
    run_id = owner.run_id if owner is not None else None
    return Settled(str(flow_run_id), run.name, str(now.state.name), why, run_id)


def _resume(client: SyncPrefectClient, report: Report) -> None:
    """Start nights again that crashed today; they go on at the stage that was cut off."""
    crashed = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
        ),
    )
    for run in crashed:
        if not may_resume(run, datetime.now(UTC)):
            continue
        client.set_flow_run_state(run.id, AwaitingRetry(scheduled_time=datetime.now(UTC)))
        state = client.read_flow_run(run.id).state
        if state is not None and state.is_scheduled():
            why = f"attempt {run.run_count + 1} of {MAX_ATTEMPTS}"
            report.resumed.append(Settled(str(run.id), run.name, str(state.name), why))


def may_resume(run: FlowRun, now: datetime) -> bool:
    """Whether a crashed flow run is a night of the last day that may be tried again."""
    if run.deployment_id is None or run.parameters.get("nightly") is not True:
        return False
    if run.run_count >= MAX_ATTEMPTS:
        return False
    return run.expected_start_time is not None and now - run.expected_start_time < timedelta(days=1)


def _close_nights(runs_dir: Path, dead: Set[str], report: Report) -> None:
    """Write into the night logs which nights were killed: begun, not ended, and the owner dead."""
    for log in night_logs(runs_dir):
        begun: dict[str | None, NightLine] = {}
        for line in log.lines():
            begun.pop(line.run_id, None)
            if line.outcome == "started":
                begun[line.run_id] = line
        for run_id, line in begun.items():
            if run_id in dead:
                killed = replace(
                    line, outcome="killed", reason="its process is gone", time_s=time.time()
                )
                log.append(killed)
                report.nights.append(killed)


def run_config(runs_dir: Path, run_id: str) -> PipelineConfig | None:
    """The config a run was started with; None where it cannot be read any more."""
    try:
        return load_config(runs_dir / run_id / "config.json")
    except (ConfigError, OSError, json.JSONDecodeError):
        return None


def _close_mlflow(runs_dir: Path, dead: Iterable[Owner], report: Report) -> None:
    """Close what dead owners left RUNNING, in each store that one of them used."""
    stores: dict[tuple[str, str | None], str] = {}
    for owner in dead:
        try:
            told = json.loads((runs_dir / owner.run_id / "config.json").read_bytes())["tracking"]
            stores[(str(told["experiment"]), told["uri"])] = owner.run_id
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its folder was cleared away; others of the same store are there
    for (experiment, uri), run_id in stores.items():
        tracker = open_tracker(runs_dir, runs_dir / run_id, experiment, uri)
        report.mlflow_closed += close_orphans(tracker.speaker)


def _tell(runs_dir: Path, settled: Settled) -> None:
    config = run_config(runs_dir, settled.run_id) if settled.run_id is not None else None
    alerts = (config or PipelineConfig()).alerts
    profile = config.profile if config is not None else FLOW
    body = f"flow run {settled.name} ({settled.flow_run_id}): {settled.why}; now {settled.state}"
    alert = Alert("crash", f"{profile}: a run crashed", body, f"crash:{settled.flow_run_id}")
    for problem in send_alert(alerts, alert, runs_dir).problems:
        logger.warning("%s", problem)


def to_json(report: Report) -> Mapping[str, Any]:
    """The report as plain data."""
    return {
        "settled": [vars(s) for s in report.settled],
        "resumed": [vars(s) for s in report.resumed],
        "nights": [f"{n.day} {n.run_id}" for n in report.nights],
        "mlflow_closed": report.mlflow_closed,
        "unknown": report.unknown,
    }
