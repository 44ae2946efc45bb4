"""A Prefect server for the time of one run, where none is configured.

Prefect starts one itself too, but that one hears the terminal's Ctrl-C with us (the run's last
calls then retry for a minute) and outlives a killed run. Ours has a session of its own and hangs
under `tasks.reaper`, so it ends with us. Database and settings lie under `runs/prefect`.
"""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tasks.artifacts.provenance import module_environment
from tasks.process_tree import TOKEN_VARIABLE
from tasks.supervise import QUIET_ENVIRONMENT, log_tail, reaped_command

START_TIMEOUT_S = 120.0
_POLL_S = 0.1
FACTORY = "prefect.server.api.server:create_app"
"""What uvicorn serves."""


class PrefectServerError(RuntimeError):
    """The server did not start."""


def prefect_environment(home: Path) -> dict[str, str]:
    """Settings that keep Prefect inside `home`, quiet, and off the network."""
    return {
        "PREFECT_HOME": str(home.resolve()),
        # this default does not follow PREFECT_HOME; the file spares later servers their set-up
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home.resolve() / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # what goes wrong is said once, by us; the server may be gone before its log client is
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_CLIENT_MAX_RETRIES": "2",
        "PREFECT_PLUGINS_ENABLED": "false",  # ours is for the `prefect` command alone
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
    uvicorn = [sys.executable, "-m", "uvicorn", "--factory", FACTORY, "--host", "127.0.0.1"]
    return reaped_command(
        [*uvicorn, "--port", str(port), "--log-level", "error", "--lifespan", "on"], 5.0
    )


class TemporaryServer:
    """A server for the time of a `with`; it starts while we import, `wait` before it is used."""

    def __init__(self, home: Path, token: str) -> None:
        self._home, self._token = home, token
        self._log_path = home / "server.log"
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "TemporaryServer":
        self._home.mkdir(parents=True, exist_ok=True)
        environment = {
            **module_environment(),
            **prefect_environment(self._home),
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            TOKEN_VARIABLE: self._token,
        }
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                _command(self._port),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=15.0)

    def wait(self) -> None:
        """Return when it answers.

        Raises:
            PrefectServerError: it ended or did not answer in time; shows its log.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(self.url):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                raise PrefectServerError(
                    f"the Prefect server {'ended' if ended else 'did not answer in time'}; its log "
                    f"{self._log_path} ends with:\n{log_tail(self._log_path)}\n"
                    "or set PREFECT_API_URL to a server that runs"
                )
            time.sleep(_POLL_S)
