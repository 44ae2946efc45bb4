"""What each service is: its command, its environment, how one tells that it works."""

import hashlib
import json
import os
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment.service_files import RUNS_VARIABLE, running
from flows.prefect_server import FACTORY
from flows.services.databases import database
from tasks.artifacts.provenance import module_environment
from tasks.process_tree import TOKEN_VARIABLE
from tasks.supervise import QUIET_ENVIRONMENT

HOST = "127.0.0.1"
POOL = "rl-pipeline"
ROOT_VARIABLE = "RL_PIPELINE_ROOT"
"""Environment variable: the folder a worker's flow runs work in; `prefect.yaml` reads it."""
HEARTBEAT_S = 30
"""A flow run says this often that it lives (30 is the shortest Prefect takes)."""
RECONCILE_S = 30
"""What was killed has its terminal state within about this."""
CLIENT_RETRIES = "8"
"""2 + 4 + … + 256 s: a run goes on where its server was away for up to eight minutes."""
LEASES = "prefect.server.concurrency.lease_storage.filesystem"
_HTTP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Ports:
    """Where the two servers listen, on 127.0.0.1."""

    prefect: int = 4200
    mlflow: int = 5000

    @property
    def api_url(self) -> str:
        """Prefect's API."""
        return f"http://{HOST}:{self.prefect}/api"

    @property
    def mlflow_url(self) -> str:
        """MLflow's server."""
        return f"http://{HOST}:{self.mlflow}"


@dataclass(frozen=True)
class ServiceSpec:
    """How one service is started."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    url: str
    port: int | None
    """None for those that listen nowhere."""
    grace_s: float
    """Time it gets to end by itself."""


def service_token(runs_dir: Path, name: str) -> str:
    """The mark every process of a service inherits, by which leftovers of a crash are found."""
    digest = hashlib.sha256(str(runs_dir.resolve()).encode()).hexdigest()[:16]
    return f"service-{digest}:{name}"


def shown_runs_dir(runs_dir: Path, root: Path) -> str:
    """The runs folder as flow runs write it down: relative inside `root`, so that it can move."""
    full = runs_dir.resolve()
    return str(full.relative_to(root)) if full.is_relative_to(root) else str(full)


def service_specs(runs_dir: Path, ports: Ports, root: Path) -> dict[str, ServiceSpec]:
    """Every service; flow runs work in `root`.

    Raises:
        DatabaseUrlError: an environment variable names no usable database.
    """
    specs = (
        _prefect(runs_dir, ports),
        _mlflow(runs_dir, ports),
        _worker(runs_dir, ports, root),
        _reconciler(runs_dir, ports, root),
    )
    return {spec.name: spec for spec in specs}


def _environment(runs_dir: Path, name: str, extra: dict[str, str]) -> dict[str, str]:
    """What all share: telemetry off, Prefect's files under the runs folder, the mark."""
    home = runs_dir.resolve() / "prefect"
    return {
        **module_environment(),
        **QUIET_ENVIRONMENT,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        # the plugin is for the command line; loaded inside a running event loop it only complains
        "PREFECT_PLUGINS_ENABLED": "false",
        "PYTHONFAULTHANDLER": "1",  # `kill -ABRT` of one that hangs writes to its log where
        TOKEN_VARIABLE: service_token(runs_dir, name),
        **extra,
    }


def _prefect(runs_dir: Path, ports: Ports) -> ServiceSpec:
    extra = {
        "PREFECT_API_URL": ports.api_url,
        "PREFECT_UI_API_URL": ports.api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # leases in memory are gone after a restart, and every run that held one crashes
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        # `--watch` shows log lines only where the server streams them, which it does not by itself
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        "PREFECT__SERVER_FINAL": "1",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    of = database("prefect", runs_dir)
    if of.postgresql is not None:
        extra["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = of.server_url
    command = (
        *(sys.executable, "-m", "uvicorn", "--factory", FACTORY),
        *("--host", HOST, "--port", str(ports.prefect), "--log-level", "warning"),
        *("--lifespan", "on", "--timeout-keep-alive", "5"),
    )
    environment = _environment(runs_dir, "prefect", extra)
    return ServiceSpec("prefect", command, environment, ports.api_url, ports.prefect, 10.0)


def _mlflow(runs_dir: Path, ports: Ports) -> ServiceSpec:
    extra = {
        # through the environment: a database password must not stand in the process list
        "MLFLOW_BACKEND_STORE_URI": database("mlflow", runs_dir).server_url,
        "MLFLOW_ARTIFACTS_DESTINATION": str((runs_dir / "mlartifacts").resolve()),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # with job execution and four workers it is 15 processes and 2.4 GB; so it is two
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    hosts = f"{HOST}:{ports.mlflow},localhost:{ports.mlflow}"
    command = (
        *(sys.executable, "-m", "mlflow", "server"),
        *("--host", HOST, "--port", str(ports.mlflow), "--workers", "1"),
        *("--allowed-hosts", hosts),
    )
    environment = _environment(runs_dir, "mlflow", extra)
    environment.pop("MLFLOW_TRACKING_URI", None)
    return ServiceSpec("mlflow", command, environment, ports.mlflow_url, ports.mlflow, 10.0)


def _worker(runs_dir: Path, ports: Ports, root: Path) -> ServiceSpec:
    extra = {
        "PREFECT_API_URL": ports.api_url,
        "MLFLOW_TRACKING_URI": ports.mlflow_url,
        RUNS_VARIABLE: shown_runs_dir(runs_dir, root),
        ROOT_VARIABLE: str(root),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_CLIENT_MAX_RETRIES": CLIENT_RETRIES,
    }
    command = (
        *(sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL),
        # one at a time is the pool's limit; the worker's own would end it when a suspended run is
        # resumed while its old process is still on its way out
        *("--type", "process", "--name", worker_name(runs_dir)),
        *("--no-create-pool-if-not-found", "--install-policy", "never"),
    )
    environment = _environment(runs_dir, "worker", extra)
    return ServiceSpec("worker", command, environment, ports.api_url, None, 30.0)


def _reconciler(runs_dir: Path, ports: Ports, root: Path) -> ServiceSpec:
    """Gives what was killed its terminal state, so that the pool's slot is free again."""
    extra = {
        "PREFECT_API_URL": ports.api_url,
        "MLFLOW_TRACKING_URI": ports.mlflow_url,
        RUNS_VARIABLE: shown_runs_dir(runs_dir, root),
    }
    command = (
        *(sys.executable, "-m", "flows.cli", "reconcile", "--resume"),
        *("--every", str(RECONCILE_S)),
    )
    environment = _environment(runs_dir, "reconciler", extra)
    return ServiceSpec("reconciler", command, environment, ports.api_url, None, 5.0)


def worker_name(runs_dir: Path) -> str:
    """The worker's name in Prefect: one for each machine and runs folder."""
    digest = service_token(runs_dir, "worker").removeprefix("service-")[:6]
    return f"{os.uname().nodename}-{digest}"


def ask(url: str, body: Any = None) -> Any:
    """GET, or POST a JSON body; the JSON answer, or the text where it is none.

    Raises:
        OSError: nothing answers, or it answers with an error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text


def healthy(name: str, url: str, runs_dir: Path) -> bool:
    """Whether a service does its work: the servers answer, the worker reports to Prefect."""
    try:
        if name == "prefect":
            return bool(ask(f"{url}/health") is True)
        if name == "mlflow":
            return bool(ask(f"{url}/health") == "OK")
        if name == "reconciler":
            return running(runs_dir, name) is not None
        workers = ask(f"{url}/work_pools/{POOL}/workers/filter", {})
    except (OSError, urllib.error.URLError):
        return False
    mine = [w for w in workers if w["name"] == worker_name(runs_dir)]
    return bool(mine) and mine[0]["status"] == "ONLINE"
