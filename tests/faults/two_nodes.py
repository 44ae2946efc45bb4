"""Two machines on one: a Ray node in each of two network namespaces, joined by a virtual cable.

The second has mounts of its own as well: it sees neither the run's folder nor the first one's
files. Both ask for a token.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

HEAD, NODE = "10.213.77.1", "10.213.77.2"
PORT = 6379
QUICK_TO_NOTICE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""A cut shows after seconds; Ray's own patience is for networks that stutter."""


def namespaces_refused() -> str | None:
    """Why this machine cannot make namespaces, or None."""
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "add", "va", "type", "veth", "peer", "vb"],
        capture_output=True, text=True,
    )  # fmt: skip
    return None if tried.returncode == 0 else tried.stderr.strip() or "no reason given"


class TwoNodes:
    """A head with `head_cpus` and a node with `node_cpus`, until `close`."""

    def __init__(self, head_cpus: int, node_cpus: int, hidden: Path, temporary: Path) -> None:
        """The node sees nothing of `hidden`; Ray's sockets lie in `temporary`, a short path."""
        _end_orphans()
        self._name = f"rl{os.getpid()}"
        self._processes: list[subprocess.Popen] = []
        self._logs = hidden
        self.environment = os.environ | QUICK_TO_NOTICE | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": Path(__file__).parents[2].as_posix(),
        }  # fmt: skip
        self.head, self.node = f"{self._name}-head", f"{self._name}-node"
        self._cable(HEAD, NODE)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        ray += ["--object-store-memory=100000000", "--disable-usage-stats"]
        self._start(
            self.head,
            [*ray, "--head", f"--port={PORT}", f"--node-ip-address={HEAD}", "--include-dashboard",
             "false", f"--num-cpus={head_cpus}", f"--temp-dir={temporary}"],
        )  # fmt: skip
        self.await_nodes(1)
        join = [*ray, f"--address={self.address}", f"--node-ip-address={NODE}"]
        hide = f'mount -t tmpfs none {hidden} && mount -t tmpfs none {temporary} && exec "$@"'
        apart = ["unshare", "--mount", "sh", "-c", hide, "sh"]
        self._start(self.node, [*apart, *join, f"--num-cpus={node_cpus}"])
        self.await_nodes(2)

    @property
    def address(self) -> str:
        """Where the cluster answers."""
        return f"{HEAD}:{PORT}"

    def _cable(self, *addresses: str) -> None:
        ends = [(self.head, f"{self._name}a"), (self.node, f"{self._name}b")]
        for namespace, _ in ends:
            _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", ends[0][1], "type", "veth", "peer", "name", ends[1][1])
        for (namespace, end), address in zip(ends, addresses, strict=True):
            _run("ip", "link", "set", end, "netns", namespace)
            inside = ("ip", "-n", namespace)
            _run(*inside, "addr", "add", f"{address}/24", "dev", end)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", end, "up")

    def _start(self, namespace: str, command: Sequence[str]) -> None:
        with (self._logs / f"{namespace}.log").open("w") as log:
            self._processes.append(self.popen(namespace, command, stdout=log, stderr=log))

    def popen(self, namespace: str, command: Sequence[str], **options) -> subprocess.Popen:
        """Start a command in a namespace, in a process group of its own."""
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            env=self.environment, start_new_session=True, **options,
        )  # fmt: skip

    def await_nodes(self, count: int) -> None:
        """Wait until that many nodes are alive."""
        script = (
            "import sys; from ray._raylet import GcsClient; "
            f"c = GcsClient(address='{self.address}'); "
            "print(sum(i.state == 0 for i in c.get_all_node_info().values()))"
        )

        def alive() -> bool:
            asked = self.popen(
                self.head, [sys.executable, "-c", script], stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            try:
                said, _ = asked.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                asked.kill()
                return False
            return said.strip().endswith(str(count))

        wait_until(alive, 90, f"{count} node(s)")

    def actors(self, namespace: str) -> list[str]:
        """Names of the Ray actors whose processes run in a namespace, such as `RolloutActor`."""
        pids = _run("ip", "netns", "pids", namespace).split()
        names = []
        for pid in map(int, pids):
            try:
                title = psutil.Process(pid).cmdline()[:1]
            except psutil.Error:
                continue
            names += [t.removeprefix("ray::").split(".")[0] for t in title if "Actor" in t]
        return names

    def cut(self) -> None:
        """Pull the cable out of the node: nothing reaches it, and nobody is told."""
        _run("ip", "-n", self.node, "link", "set", f"{self._name}b", "down")

    def close(self) -> None:
        """End every process of both namespaces, and the namespaces."""
        for namespace in (self.node, self.head):
            _end(namespace)
        for process in self._processes:
            process.wait()


def _end(namespace: str) -> None:
    """Kill everything in a namespace and take it away."""
    for pid in _run("ip", "netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", namespace)


def _end_orphans() -> None:
    """Take away what a test that was killed itself has left."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = re.fullmatch(r"rl(\d+)-(head|node)", name)
        if owner and not psutil.pid_exists(int(owner[1])):
            _end(name)


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Look again and again; a failure names what did not come."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
