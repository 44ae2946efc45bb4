"""A fresh clone with its own services on free ports, to be killed in every way there is."""

import contextlib
import http.client
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from service_stack import CHECKOUT, Stack

from deployment.service_files import SERVICES, read_state
from tasks.process_tree import descendants

TERMINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
DOWN_S = 120.0


class Checkout(Stack):
    """The clone's services, its runs, and the processes of both."""

    def require_up(self) -> None:
        """`rl-pipeline up`; fails loudly."""
        done = self.up()
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, **parameters: Any) -> str:
        """Start a deployment run; returns its flow run id."""
        deployment = self.api("/deployments/name/rl-pipeline/rl-pipeline")
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        made = self.api(f"/deployments/{deployment['id']}/create_flow_run", body)
        return str(made["id"])

    def state_of(self, flow_run_id: str) -> str:
        """Type of the run's state; empty while the server does not answer."""
        try:
            return str(self.api(f"/flow_runs/{flow_run_id}")["state_type"])
        except (OSError, http.client.HTTPException):
            return ""

    def wait(self, flow_run_id: str, timeout_s: float) -> str:
        """The terminal state, or the last one seen when the time is over."""
        deadline_s, state = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline_s:
            state = self.state_of(flow_run_id) or state
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
            self.down(DOWN_S)
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
    clone, home = folder / "checkout", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(clone)], check=True)
    living = Checkout(clone / "runs", home, root=clone, exported=False)
    try:
        living.require_up()
        yield living
    finally:
        living.close()
