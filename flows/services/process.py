"""Starts, finds and ends the process tree of one service."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from deployment.service_files import ServiceState, running, services_dir, state_path
from flows.services.specs import HOST, ServiceSpec, service_token
from tasks.artifacts import write_json
from tasks.process_tree import end_marked
from tasks.supervise import reaped_command

MAX_LOG_BYTES = 10 << 20
PORT_PATIENCE_S = 5.0
"""A killed program gives its port back only when the last of its threads is gone."""
_POLL_S = 0.2


class PortTakenError(OSError):
    """Another program listens where a service is to listen."""


class ServicesBusyError(RuntimeError):
    """Another `up` or `down` is at work on the same runs folder."""


class ServiceStopError(RuntimeError):
    """A service did not end."""


def log_path(runs_dir: Path, name: str) -> Path:
    """What the service printed."""
    return services_dir(runs_dir) / f"{name}.log"


@contextlib.contextmanager
def services_lock(runs_dir: Path) -> Iterator[None]:
    """One `up` or `down` at a time; the kernel frees the lock of one that was killed.

    Raises:
        ServicesBusyError: another one holds it.
    """
    folder = services_dir(runs_dir)
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServicesBusyError(
                f"another `rl-pipeline up` or `down` is at work on {runs_dir}; wait for it"
            ) from error
        yield
    finally:
        os.close(handle)


def refuse_taken_port(spec: ServiceSpec, patience_s: float = PORT_PATIENCE_S) -> None:
    """Make sure that the service can listen.

    Raises:
        PortTakenError: it cannot; names who holds the port, where that can be seen.
    """
    if spec.port is None:
        return
    deadline_s = time.monotonic() + patience_s
    while (problem := _bind_problem(spec.port)) is not None:
        if time.monotonic() > deadline_s:
            holder = _holder(spec.port)
            raise PortTakenError(
                f"{HOST}:{spec.port} is taken{f' by {holder}' if holder else ''} ({problem}), so "
                f"{spec.name} cannot listen there; stop that program, or choose another port: "
                f"rl-pipeline up --{spec.name}-port {spec.port + 1}"
            )
        time.sleep(_POLL_S)


def _bind_problem(port: int) -> str | None:
    """Why nobody can listen on a port now; None where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _holder(port: int) -> str:
    """Who listens on a port, as far as we may see it."""
    try:
        pids = {
            c.pid
            for c in psutil.net_connections("inet")
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid
        }
        return ", ".join(f"process {pid} ({psutil.Process(pid).name()})" for pid in sorted(pids))
    except (psutil.AccessDenied, psutil.NoSuchProcess, OSError):
        return ""


def start_service(spec: ServiceSpec, runs_dir: Path, root: Path) -> ServiceState:
    """Start it in a session of its own under a reaper that outlives us; write its state down.

    Raises:
        PortTakenError: its port is taken.
    """
    end_marked(service_token(runs_dir, spec.name))  # what a crash left would hold port and files
    refuse_taken_port(spec)
    log = log_path(runs_dir, spec.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        os.replace(log, log.with_suffix(".log.1"))
    with log.open("ab") as output:
        process = subprocess.Popen(
            reaped_command([*spec.command], spec.grace_s, detached=True),
            env=spec.environment,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time()
    state = ServiceState(spec.name, spec.url, process.pid, started)
    body = {"name": state.name, "url": state.url, "pid": state.pid, "started": state.started}
    write_json(state_path(runs_dir, spec.name), body)
    return state


def stop_service(name: str, runs_dir: Path, grace_s: float) -> bool:
    """End the service and every process it started; whether there was anything to end.

    Raises:
        ServiceStopError: something of it still lives.
    """
    state = running(runs_dir, name)
    if state is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s + 20.0
        while state.alive and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if state.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGKILL)
    left = end_marked(service_token(runs_dir, name))
    if state is not None and state.alive:
        raise ServiceStopError(
            f"{name} (process {state.pid}) does not end; kill it by hand: kill -9 {state.pid}"
        )
    state_path(runs_dir, name).unlink(missing_ok=True)
    return state is not None or left > 0


def tree_facts(state: ServiceState) -> tuple[int, int]:
    """Number of processes of a service, the reaper included, and their memory in bytes (RSS)."""
    try:
        reaper = psutil.Process(state.pid)
        processes = [reaper, *reaper.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    memory = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            memory += int(process.memory_info().rss)
    return len(processes), memory
