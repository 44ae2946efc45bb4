"""A fresh clone with its own services on free ports, to be killed in every way there is."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from deployment.service_files import SERVICES, read_state
from tasks.process_tree import descendants

ROOT = Path(__file__).parents[2]
TERMINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
POLL_S = 0.1


def free_port() -> int:
    """A port nobody listens on."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Checkout:
    """The clone, and its Prefect server as a person's tools see it."""

    root: Path
    ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))

    @property
    def runs(self) -> Path:
        """Its folder of runs."""
        return self.root / "runs"

    @property
    def environment(self) -> dict[str, str]:
        """What a shell in the checkout has: the environment's programs and two ports."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        dropped = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")
        kept = {k: v for k, v in os.environ.items() if k not in dropped}
        ports = zip(
            ("RL_PIPELINE_PREFECT_PORT", "RL_PIPELINE_MLFLOW_PORT"), self.ports, strict=True
        )
        return {**kept, "PATH": path, "PYTHONPATH": str(self.root)} | {n: str(p) for n, p in ports}

    def shell(self, *command: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the checkout; its output is kept."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def cli(self, *arguments: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """`rl-pipeline …`, from this clone's code."""
        code = "from flows.cli import main; main()"
        return self.shell(sys.executable, "-c", code, *arguments, timeout_s=timeout_s)

    def up(self) -> None:
        """`rl-pipeline up`; fails loudly."""
        done = self.cli("up")
        assert done.returncode == 0, done.stdout + done.stderr

    def api(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One call to the Prefect server."""
        url = f"http://127.0.0.1:{self.ports[0]}/api/{path}"
        answer = httpx.request(method, url, json=body, timeout=30.0)
        answer.raise_for_status()
        return answer.json()

    def start(self, **parameters: Any) -> str:
        """Start a deployment run; returns its flow run id."""
        deployment = self.api("GET", "deployments/name/rl-pipeline/rl-pipeline")
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        made = self.api("POST", f"deployments/{deployment['id']}/create_flow_run", body)
        return str(made["id"])

    def state(self, flow_run_id: str) -> str:
        """Type of the run's state; empty while the server does not answer."""
        try:
            return str(self.api("GET", f"flow_runs/{flow_run_id}")["state_type"])
        except httpx.HTTPError:
            return ""

    def wait(self, flow_run_id: str, timeout_s: float) -> str:
        """The terminal state, or the last one seen when the time is over."""
        deadline_s, state = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline_s:
            state = self.state(flow_run_id) or state
            if state in TERMINAL:
                return state
            time.sleep(1.0)
        return state

    def service(self, name: str) -> psutil.Process | None:
        """The process that holds a service."""
        state = read_state(self.runs, name)
        return psutil.Process(state.pid) if state is not None and state.alive else None

    def tree(self) -> list[psutil.Process]:
        """Every process of the services and all they started."""
        roots = [p for p in map(self.service, SERVICES) if p is not None]
        return [*roots, *(d for root in roots for d in descendants(root.pid))]

    def stage_process(self, stage: str) -> psutil.Process | None:
        """The process that does a stage's work now."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "tasks.stage_process" in line and f"/store/{stage}/" in " ".join(line):
                    return process
        return None

    def flow_process(self) -> psutil.Process | None:
        """The process of the flow run: the parent of the stage's reaper."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if "prefect.engine" in line or "prefect.flow_engine" in line:
                    return process
        return None

    def records(self) -> dict[str, dict[str, Any]]:
        """What the newest run left, by stage."""
        body: dict[str, dict[str, Any]] = json.loads(
            (self.runs / "latest" / "records.json").read_bytes()
        )
        return body

    def close(self) -> None:
        """End everything, whatever state it is in."""
        tree = self.tree()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.cli("down", timeout_s=120.0)
        kill(tree)


def kill(processes: list[psutil.Process]) -> None:
    """`kill -9`, children before they can be adopted."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def alive(processes: list[psutil.Process]) -> list[str]:
    """Command lines of those that still run (zombies do not)."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


@contextlib.contextmanager
def checkout(folder: Path) -> Iterator[Checkout]:
    """A clone of what is committed here, its services up for the time of the `with`."""
    clone = folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    living = Checkout(clone)
    try:
        living.up()
        yield living
    finally:
        living.close()
