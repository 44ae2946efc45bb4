"""A Prefect server for the time of one run, where none is configured.

Prefect starts one itself too, but that one hears the terminal's Ctrl-C with us (the run's last
calls then retry for a minute) and outlives a killed run. Ours has a session of its own and hangs
under `tasks.reaper`, so it ends with us. Database and settings lie under `runs/prefect`.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tasks.process_tree import TOKEN_VARIABLE
from tasks.supervise import QUIET_ENVIRONMENT, log_tail, reaped_command

START_TIMEOUT_S = 120.0
_POLL_S = 0.1
_FACTORY = "prefect.server.api.server:create_app"


class PrefectServerError(RuntimeError):
    """The server did not start."""


def prefect_environment(home: Path) -> dict[str, str]:
    """Settings that keep Prefect inside `home`, quiet, and off the network."""
    return {
        "PREFECT_HOME": str(home.resolve()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_CLIENT_MAX_RETRIES": "2",
        **QUIET_ENVIRONMENT,
    }


def _free_port() -> int:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _command(port: int) -> list[str]:
    uvicorn = [sys.executable, "-m", "uvicorn", "--factory", _FACTORY, "--host", "127.0.0.1"]
    return reaped_command(
        [*uvicorn, "--port", str(port), "--log-level", "error", "--lifespan", "on"], 5.0
    )


@contextlib.contextmanager
def temporary_server(home: Path, token: str) -> Iterator[str]:
    """Run a server and yield its API address.

    Raises:
        PrefectServerError: it ended or did not answer in time; shows its log.
    """
    home.mkdir(parents=True, exist_ok=True)
    port, log_path = _free_port(), home / "server.log"
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        **prefect_environment(home),
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        TOKEN_VARIABLE: token,
    }
    with log_path.open("ab") as log:
        server = subprocess.Popen(
            _command(port),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _await(server, url, log_path)
            yield url
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=15.0)


def _await(server: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if server.poll() is not None or time.monotonic() > deadline_s:
            what = "ended" if server.poll() is not None else "did not answer in time"
            raise PrefectServerError(
                f"the Prefect server {what}; its log {log_path} ends with:\n{log_tail(log_path)}\n"
                "or set PREFECT_API_URL to a server that runs"
            )
        time.sleep(_POLL_S)
