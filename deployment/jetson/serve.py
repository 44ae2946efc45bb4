"""Verifies a bundle against the pinned key and runs its own agent on this machine."""

import contextlib
import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment.jetson.archive import extract_archive
from deployment.jetson.errors import ServeError
from deployment.jetson.on_device.front import LOOPBACK_NAMES
from deployment.jetson.on_device.smoke import SmokeError, wait_healthy
from deployment.jetson.on_device.verify import BundleError, ssh_keygen_verify, verify_bundle
from deployment.jetson.signing import verify as verify_without_ssh_keygen

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told what is going on and for how many seconds the agent has been starting."""
TAIL_LINES = 40
STOP_S = 15.0
_POLL_S = 0.5


def verify(bundle: Path, allowed_signers: Path) -> dict[str, Any]:
    """The manifest of a good bundle folder; uses `ssh-keygen` where there is one.

    Raises:
        BundleError: changed, incomplete, or not signed by a pinned key.
    """
    has_program = shutil.which("ssh-keygen") is not None
    check = ssh_keygen_verify if has_program else verify_without_ssh_keygen
    return verify_bundle(bundle, allowed_signers, check)


@contextlib.contextmanager
def verified(bundle: Path, allowed_signers: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(folder, manifest) of a bundle folder or archive; an archive is unpacked for as long.

    Raises:
        BundleError, UnsafeArchiveError: the bundle is refused.
    """
    if not bundle.exists():
        raise BundleError(f"{bundle} does not exist; name a bundle folder or its .tar.gz")
    if bundle.is_dir():
        yield bundle.resolve(), verify(bundle, allowed_signers)
        return
    with tempfile.TemporaryDirectory(prefix="rl-pipeline-bundle-") as temporary:
        folder = extract_archive(bundle, Path(temporary))
        yield folder, verify(folder, allowed_signers)


@dataclass
class RunningAgent:
    """A served bundle."""

    url: str
    manifest: dict[str, Any]
    process: subprocess.Popen
    said: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    """The last lines the agent wrote."""

    def stop(self) -> None:
        """End the agent; its model server goes with it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _check_address(host: str, port: int) -> None:
    if host not in LOOPBACK_NAMES:
        raise ServeError(f"host={host!r}: the agent listens on 127.0.0.1 only; use an SSH tunnel")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ServeError(
                f"cannot listen on {host}:{port} ({error}); choose another port"
            ) from None


def _read_output(agent: RunningAgent) -> None:
    if agent.process.stdout is None:
        return
    for raw in agent.process.stdout:
        line = raw.decode(errors="replace").rstrip()
        agent.said.append(line)
        log.debug("%s", line)


def _await(
    agent: RunningAgent, deadline_s: float, on_progress: Progress, stop: threading.Event
) -> None:
    """Wait until the agent answers or `stop` is set, telling `on_progress` meanwhile.

    Raises:
        ServeError: it ended, or took longer than `deadline_s`.
    """
    start_s = time.monotonic()
    while not stop.is_set():
        passed_s = time.monotonic() - start_s
        on_progress("loading the model", passed_s)
        with contextlib.suppress(SmokeError):
            wait_healthy(agent.url, _POLL_S, lambda: agent.process.poll() is not None)
            on_progress("ready", time.monotonic() - start_s)
            return
        if agent.process.poll() is not None or passed_s > deadline_s:
            ended = agent.process.poll() is not None
            what = "the agent ended" if ended else f"no answer within {deadline_s:.0f} s"
            raise ServeError(f"{what}; it said:\n" + "\n".join(agent.said))


@contextlib.contextmanager
def running(
    bundle: Path,
    allowed_signers: Path,
    port: int,
    host: str = "127.0.0.1",
    *,
    quant: str | None = None,
    threads: int | None = None,
    deadline_s: float = 300.0,
    on_progress: Progress = lambda message, seconds: None,
    stop: threading.Event | None = None,
) -> Iterator[RunningAgent]:
    """Verify the bundle, start its agent, yield it once it answers, end it afterwards.

    The code that runs is the bundle's own, with the standard library only; it ends when this
    process ends, however that happens. Setting `stop` ends the wait for it.

    Raises:
        BundleError, UnsafeArchiveError: the bundle is refused; nothing of it was run.
        ServeError: a wrong address or quantisation, or the agent did not start.
    """
    _check_address(host, port)
    on_progress("verifying hashes and signature", 0.0)
    with verified(bundle, allowed_signers) as (folder, manifest):
        chosen = quant or manifest["default"]
        if chosen not in manifest["models"]:
            raise ServeError(f"quant={quant!r}: the bundle has {sorted(manifest['models'])}")
        command = [sys.executable, "-S", "-E", "-B", str(folder / "agent.py")]
        command += ["--bundle", str(folder), "--host", host, "--port", str(port), "--with-stdin"]
        command += ["--python", sys.executable, "--quant", chosen, "--deadline", str(deadline_s)]
        command += ["--threads", str(threads)] if threads else []
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        agent = RunningAgent(f"http://{host}:{port}", manifest, process)
        threading.Thread(target=_read_output, args=(agent,), daemon=True).start()
        try:
            _await(agent, deadline_s, on_progress, stop or threading.Event())
            yield agent
        finally:
            agent.stop()


def serve(
    bundle: Path,
    allowed_signers: Path,
    port: int,
    host: str = "127.0.0.1",
    *,
    quant: str | None = None,
    threads: int | None = None,
    deadline_s: float = 300.0,
    on_progress: Progress = lambda message, seconds: None,
    on_ready: Callable[[RunningAgent], None] = lambda agent: None,
) -> int:
    """Serve a bundle until SIGINT or SIGTERM; the agent's exit status, 0 after a signal.

    Call it on the main thread. Raises as `running` does.
    """
    stop = threading.Event()
    before = {n: signal.signal(n, lambda *_: stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    options: dict[str, Any] = {"quant": quant, "threads": threads, "deadline_s": deadline_s}
    try:
        with running(
            bundle, allowed_signers, port, host, on_progress=on_progress, stop=stop, **options
        ) as agent:
            if not stop.is_set():
                on_ready(agent)
            while not stop.wait(_POLL_S):
                status = agent.process.poll()
                if status is not None:
                    raise ServeError(f"the agent ended ({status}):\n" + "\n".join(agent.said))
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
