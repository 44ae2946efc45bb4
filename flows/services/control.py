"""`up`, `down`, `ps`: the Prefect server, MLflow and a worker of one runs folder, on 127.0.0.1.

`up` brings every service to the state it should be in and leaves alone what is there already;
after a crash it clears what is left and starts again. `down` ends every process they started.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from deployment.service_files import (
    SERVICES,
    ServiceState,
    read_state,
    running,
    services_environment,
)
from flows.services.process import (
    log_path,
    refuse_taken_port,
    services_lock,
    start_service,
    stop_service,
    tree_facts,
)
from flows.services.specs import Ports, ServiceSpec, healthy, service_specs
from flows.services.store import Tell, prepare_databases, release_artifacts
from tasks.supervise import log_tail

__all__ = ["ServiceStatus", "down", "services_environment", "statuses", "up"]

START_TIMEOUT_S = 180.0
"""Loading Prefect or MLflow and making a database takes half a minute on a slow machine."""
DEPLOY_TIMEOUT_S = 300.0
_HEALTH_PATIENCE_S = 10.0
_WORKER_PATIENCE_S = 45.0
"""A worker reports every 30 s, to a server that may have been away."""
_POLL_S = 0.5


class ServiceStartError(RuntimeError):
    """A service ended at once or does not answer; shows the end of its log."""


class DeployError(RuntimeError):
    """Work pool, deployment or automation could not be put in place."""


@dataclass(frozen=True)
class ServiceStatus:
    """One line of `ps`."""

    name: str
    state: str
    """`running`, `not answering`, `crashed` or `stopped`."""
    url: str
    pid: int | None
    started: float | None
    processes: int
    memory_bytes: int
    log: Path


def up(runs_dir: Path, ports: Ports, root: Path, tell: Tell) -> dict[str, str]:
    """Bring the services up and deploy; returns the environment of their clients.

    Raises:
        ServicesBusyError, PortTakenError, ServiceStartError, DeployError, BackupError,
        DatabaseNewerError, DatabaseUnusableError, DatabaseUrlError: see the classes.
    """
    with services_lock(runs_dir):
        ports = _ports_in_use(runs_dir, ports)
        specs = service_specs(runs_dir, ports, root)
        servers = [spec for spec in specs.values() if spec.port is not None]
        clients = [spec for spec in specs.values() if spec.port is None]
        starting = [spec for spec in servers if not _keeps_running(spec, runs_dir, tell)]
        for spec in starting:  # before anything is touched
            refuse_taken_port(spec)
        if starting:
            prepare_databases(runs_dir, tell)
        if any(spec.name == "mlflow" for spec in starting):
            release_artifacts(runs_dir, tell)
        states = [(spec, _start(spec, runs_dir, root, tell)) for spec in starting]
        for spec, state in states:
            _wait(spec, state, runs_dir, tell)
        _deploy(specs["worker"], runs_dir, root, tell)
        # judged last: a worker whose server was away works, and so does the run it holds
        for spec in clients:
            if not _keeps_running(spec, runs_dir, tell):
                _wait(spec, _start(spec, runs_dir, root, tell), runs_dir, tell)
    return services_environment(runs_dir)


def _ports_in_use(runs_dir: Path, wanted: Ports) -> Ports:
    """A server that runs keeps its port; a worker, too, is told where its servers really are."""
    from urllib.parse import urlsplit

    found = {}
    for name in ("prefect", "mlflow"):
        state = running(runs_dir, name)
        port = urlsplit(state.url).port if state is not None else None
        found[name] = port or getattr(wanted, name)
    return Ports(**found)


def _keeps_running(spec: ServiceSpec, runs_dir: Path, tell: Tell) -> bool:
    """Whether the service works as it is; one that does not answer is ended here."""
    state = running(runs_dir, spec.name)
    if state is None:
        crashed = read_state(runs_dir, spec.name) is not None
        stop_service(spec.name, runs_dir, spec.grace_s)
        if crashed:
            tell(spec.name, "had crashed or the machine was restarted; it is started again")
        return False
    if state.url != spec.url:
        tell(spec.name, "works for another server; it is started again")
        stop_service(spec.name, runs_dir, spec.grace_s)
        return False
    patience_s = _WORKER_PATIENCE_S if spec.port is None else _HEALTH_PATIENCE_S
    deadline_s = time.monotonic() + patience_s
    while not healthy(spec.name, state.url, runs_dir):
        if time.monotonic() > deadline_s:
            tell(spec.name, "does not answer; it is started again")
            stop_service(spec.name, runs_dir, spec.grace_s)
            return False
        time.sleep(_POLL_S)
    tell(spec.name, f"runs already, {spec.url} (process {state.pid})")
    return True


def _start(spec: ServiceSpec, runs_dir: Path, root: Path, tell: Tell) -> ServiceState:
    tell(spec.name, "starts")
    return start_service(spec, runs_dir, root)


def _wait(spec: ServiceSpec, state: ServiceState, runs_dir: Path, tell: Tell) -> None:
    """Return when the service works.

    Raises:
        ServiceStartError: it ended or did not work in time; nothing of it is left.
    """
    start_s = time.monotonic()
    while not healthy(spec.name, spec.url, runs_dir):
        ended = not state.alive
        if ended or time.monotonic() - start_s > START_TIMEOUT_S:
            log = log_path(runs_dir, spec.name)
            tail = log_tail(log)
            stop_service(spec.name, runs_dir, spec.grace_s)
            raise ServiceStartError(
                f"{spec.name} {'ended' if ended else f'did not answer in {START_TIMEOUT_S:.0f} s'}"
                f"; its log {log} ends with:\n{tail}"
            )
        time.sleep(_POLL_S)
    tell(spec.name, f"works, {spec.url} ({time.monotonic() - start_s:.0f} s)")


def _deploy(worker: ServiceSpec, runs_dir: Path, root: Path, tell: Tell) -> None:
    """Put pool, deployment and automation in place, in a process with the worker's settings.

    Raises:
        DeployError: the server refused; shows why.
    """
    tell("deployment", "pool, deployment and automation are put in place")
    command = [sys.executable, "-m", "flows.services.deploy", str(runs_dir.resolve())]
    try:
        done = subprocess.run(
            command,
            env=worker.environment,
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEPLOY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeployError(
            f"deploying took over {DEPLOY_TIMEOUT_S:.0f} s; run `up` again"
        ) from error
    if done.returncode != 0:
        raise DeployError(f"deploying failed:\n{(done.stdout + done.stderr).strip()}")
    tell("deployment", done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "is there")


def down(runs_dir: Path, tell: Tell) -> int:
    """End the services, the worker first so that the servers hear how its runs end; how many.

    Raises:
        ServicesBusyError, ServiceStopError: see the classes.
    """
    stopped = 0
    with services_lock(runs_dir):
        for name in reversed(SERVICES):
            if stop_service(name, runs_dir, 30.0 if name == "worker" else 10.0):
                stopped += 1
                tell(name, "stopped")
            else:
                tell(name, "did not run")
    return stopped


def statuses(runs_dir: Path) -> list[ServiceStatus]:
    """How each service is, now."""
    return [_status(name, runs_dir) for name in SERVICES]


def _status(name: str, runs_dir: Path) -> ServiceStatus:
    log = log_path(runs_dir, name)
    state = read_state(runs_dir, name)
    if state is None:
        return ServiceStatus(name, "stopped", "", None, None, 0, 0, log)
    if not state.alive:
        return ServiceStatus(name, "crashed", state.url, None, state.started, 0, 0, log)
    shown = "running" if healthy(name, state.url, runs_dir) else "not answering"
    processes, memory = tree_facts(state)
    return ServiceStatus(name, shown, state.url, state.pid, state.started, processes, memory, log)
