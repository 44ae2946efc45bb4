"""A Prefect server and a process worker for real, running the flow over the tiny stages.

The commands and settings are those `rl-pipeline up` uses, on ports of their own.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from flows.services.specs import POOL, Ports, ServiceSpec, healthy, service_specs
from tasks.artifacts import write_json
from tasks.supervise import reaped_command
from tests.flows.living import pid_lives
from tests.flows.tiny_stages import BEHAVIOUR_FILE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def free_port() -> int:
    """A port nobody listens on now."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: Callable[[], Any], timeout_s: float, why: str) -> Any:
    """The first truthy answer of `what`; fails the test after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline_s, f"{why} within {timeout_s:.0f} s"
        time.sleep(0.2)
    return found


@dataclass
class World:
    """Server and worker over one folder of runs, both started and killed at will."""

    folder: Path
    """Working directory of server, worker and flow runs; its `runs/` is the folder of runs."""
    extra: dict[str, str] = field(default_factory=dict)
    ports: Ports = field(default_factory=lambda: Ports(free_port(), free_port()))
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    deployment_id: UUID | None = None

    @property
    def runs(self) -> Path:
        """The folder of runs."""
        return self.folder / "runs"

    @property
    def api_url(self) -> str:
        """Prefect's API."""
        return self.ports.api_url

    def spec(self, name: str) -> ServiceSpec:
        """How `up` would start the service."""
        return service_specs(self.runs, self.ports, self.folder)[name]

    def start(self, name: str) -> None:
        """Start a service and wait until it works."""
        spec = self.spec(name)
        store = f"sqlite:///{(self.runs / 'mlflow.db').resolve()}"
        environment = {
            **spec.environment,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
            "MLFLOW_TRACKING_URI": store,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "2",
            "OMP_NUM_THREADS": "1",
            **self.extra,
        }
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            self.processes[name] = subprocess.Popen(
                reaped_command(list(spec.command), spec.grace_s),
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if spec.port is not None:
            wait_for(lambda: healthy(name, spec.url, self.runs), 120, f"{name} answers ({log})")

    def kill(self, name: str) -> None:
        """`kill -9` a service with all its processes."""
        process = self.processes.pop(name)
        for pid in tree_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End everything that still runs."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
        self.processes.clear()

    @contextlib.contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        """A client of the server."""
        settings = temporary_settings({PREFECT_API_URL: self.api_url})
        with settings, get_client(sync_client=True) as client:
            yield client

    def deploy(self, entrypoint: str = "tiny_flow.rl_pipeline") -> UUID:
        """Make the pool, limit 1, and the deployment; returns its id."""
        with self.client() as client:
            client.create_work_pool(
                WorkPoolCreate(
                    name=POOL,
                    type="process",
                    base_job_template=ProcessWorker.get_default_base_job_template(),
                    concurrency_limit=1,
                )
            )
            flow_id = client.create_flow_from_name("rl-pipeline")
            return client.create_deployment(
                flow_id,
                "rl-pipeline",
                work_pool_name=POOL,
                entrypoint=entrypoint,
                pull_steps=[
                    {
                        "prefect.deployments.steps.set_working_directory": {
                            "directory": str(self.folder)
                        }
                    }
                ],
            )

    def state(self, flow_run_id: UUID) -> str:
        """Type of the flow run's state."""
        with self.client() as client:
            state = client.read_flow_run(flow_run_id).state
        return state.type.value if state is not None else ""

    def read(self, flow_run_id: UUID) -> FlowRun:
        """The flow run as it stands."""
        with self.client() as client:
            return client.read_flow_run(flow_run_id)

    def ended(self, flow_run_id: UUID, timeout_s: float = 120) -> FlowRun:
        """The flow run, once it has ended."""
        wait_for(
            lambda: self.state(flow_run_id) in TERMINAL,
            timeout_s,
            f"flow run {flow_run_id} ends ({(self.folder / 'worker.log').read_text()[-3000:]})",
        )
        return self.read(flow_run_id)

    def hanging(self, stage: str, timeout_s: float = 120) -> dict[str, int]:
        """Pids of a stage that was told to hang, once it does."""

        def living() -> dict[str, int] | None:
            for path in self.runs.glob(f"store/{stage}/*/hanging.json"):
                pids: dict[str, int] = json.loads(path.read_bytes())
                if pid_lives(pids["pid"]):
                    return pids
            return None

        found: dict[str, int] = wait_for(living, timeout_s, f"stage {stage} hangs")
        return found

    def behave(self, **what: str) -> None:
        """Tell tiny stages that start from now on to misbehave."""
        write_json(self.folder / BEHAVIOUR_FILE, what)


def tree_of(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))]


def all_gone(pids: list[int], timeout_s: float) -> bool:
    """Whether every one of them ended in time."""
    deadline_s = time.monotonic() + timeout_s
    while any(pid_lives(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def cli(world: World, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`rl-pipeline …` in the world."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": world.api_url,
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(world.runs / "prefect"),
    }
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=world.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
