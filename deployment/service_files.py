"""Where running services are written down: `runs/services/<name>.json`.

Below the flows, because the Prefect command line, too, asks here which server is this checkout's.
Standard library and psutil only: it is read at every start of `prefect`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVICES = ("prefect", "mlflow", "worker", "reconciler")
"""In the order in which they start."""
RUNS_VARIABLE = "RL_PIPELINE_RUNS"
"""Environment variable: the folder of runs a worker's flow runs write to."""
DEFAULT_RUNS = "runs"
_START_TOLERANCE_S = 1.0


@dataclass(frozen=True)
class ServiceState:
    """One service as it was started."""

    name: str
    url: str
    """What a client connects to; for the worker, the Prefect server it asks for work."""
    pid: int
    """The reaper that holds the service's process tree."""
    started: float
    """Creation time of that process, seconds since the epoch: a reused pid is told apart."""

    @property
    def alive(self) -> bool:
        """Whether that very process runs (a zombie does not)."""
        import psutil

        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _START_TOLERANCE_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def services_dir(runs_dir: Path) -> Path:
    """Folder of state files and logs."""
    return runs_dir / "services"


def state_path(runs_dir: Path, name: str) -> Path:
    """State file of one service."""
    return services_dir(runs_dir) / f"{name}.json"


def read_state(runs_dir: Path, name: str) -> ServiceState | None:
    """What was written down when the service started; None where nothing usable was."""
    try:
        body = json.loads(state_path(runs_dir, name).read_bytes())
        return ServiceState(
            str(body["name"]), str(body["url"]), int(body["pid"]), float(body["started"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running(runs_dir: Path, name: str) -> ServiceState | None:
    """The service, where its process lives."""
    state = read_state(runs_dir, name)
    return state if state is not None and state.alive else None


def services_environment(runs_dir: Path) -> dict[str, str]:
    """What a client needs to reach the services of `runs_dir`; empty where none run."""
    found = {}
    if (prefect := running(runs_dir, "prefect")) is not None:
        found["PREFECT_API_URL"] = prefect.url
    if (mlflow := running(runs_dir, "mlflow")) is not None:
        found["MLFLOW_TRACKING_URI"] = mlflow.url
    return found


def runs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of runs where nobody named one."""
    return Path(environment.get(RUNS_VARIABLE) or DEFAULT_RUNS)
