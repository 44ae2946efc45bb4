"""The services of `rl-pipeline up` in a folder and on ports of their own, driven as a user does."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from deployment.service_files import SERVICES
from flows.services.specs import service_token
from tasks.process_tree import marked

CHECKOUT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
COMMAND_TIMEOUT_S = 1500.0
"""A whole run on a machine that does much else; on an idle one it is a minute."""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Stack:
    """Services of one runs folder; `home` keeps Prefect out of the tester's own."""

    runs: Path
    home: Path
    root: Path = CHECKOUT
    prefect_port: int = field(default_factory=free_port)
    mlflow_port: int = field(default_factory=free_port)
    environment: dict[str, str] = field(default_factory=dict)
    exported: bool = True
    """Whether the runs folder is exported; not needed where it is the checkout's own `runs`."""

    def env(self) -> dict[str, str]:
        """A user's environment: no address of any server in it."""
        outside = ("PREFECT_", "MLFLOW_", "RL_PIPELINE_")
        plain = {k: v for k, v in os.environ.items() if not k.startswith(outside)}
        own = {"HOME": str(self.home), "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        runs = {"RL_PIPELINE_RUNS": str(self.runs)} if self.exported else {}
        return {**plain, **own, **runs, **self.environment}

    def run(
        self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """A command typed in the checkout."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.env(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def ours(
        self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """`rl-pipeline …`."""
        return self.run(sys.executable, "-m", "flows.cli", *arguments, timeout_s=timeout_s)

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`prefect …`, the console script itself."""
        return self.run(str(BIN / "prefect"), *arguments)

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`rl-pipeline up`."""
        ports = ("--prefect-port", str(self.prefect_port), "--mlflow-port", str(self.mlflow_port))
        return self.ours("up", "--runs", str(self.runs), *ports, *arguments)

    def down(self, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """`rl-pipeline down`."""
        return self.ours("down", "--runs", str(self.runs), timeout_s=timeout_s)

    def state(self, name: str) -> dict[str, Any]:
        """State file of a service."""
        return json.loads((self.runs / "services" / f"{name}.json").read_bytes())

    def pids(self) -> dict[str, int]:
        """Reaper of each service."""
        return {name: self.state(name)["pid"] for name in SERVICES}

    def living(self) -> list[psutil.Process]:
        """Every process the services started that still runs."""
        return [p for name in SERVICES for p in marked(service_token(self.runs, name))]

    def api(self, path: str, body: Any = None) -> Any:
        """Ask Prefect's server."""
        url = f"http://127.0.0.1:{self.prefect_port}/api{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return json.loads(answer.read())

    def flow_runs(self) -> list[dict[str, Any]]:
        """Every flow run, the newest first."""
        return self.api("/flow_runs/filter", {"sort": "START_TIME_DESC"})

    def wait_for_stage(self, stage: str, timeout_s: float = 200.0) -> None:
        """Return when a worker's run is inside a stage."""
        deadline_s = time.monotonic() + timeout_s
        while not list((self.runs / "store" / stage).glob("*/.stage/request.json")):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no run reached stage {stage} in {timeout_s:.0f} s")
            time.sleep(0.2)
