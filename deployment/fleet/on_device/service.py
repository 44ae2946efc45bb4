"""Starts and stops an agent: by systemd on a real device, by `keep_alive.py` elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time

from deployment.fleet.on_device import keep_alive
from deployment.fleet.on_device.places import DeviceError, Places, write_whole

SCOPES = ("systemd", "process")
MAX_LOG_BYTES = 4 << 20
_STOP_S = 25.0
_COMMAND_S = 120.0
_POLL_S = 0.05


class Service:
    """One agent's service."""

    def __init__(self, places: Places, scope: str, python: str, port: int, source: str) -> None:
        if scope not in SCOPES:
            raise DeviceError("request", f"service {scope!r} is none of {', '.join(SCOPES)}")
        self.places, self.scope, self.python, self.port = places, scope, python, port
        self._source = source

    def restart(self) -> None:
        """Have what `current` names served.

        Raises:
            DeviceError: it cannot be started.
        """
        if self.scope == "systemd":
            self._restart_unit()
        else:
            self.stop()
            self._start_process()

    def stop(self) -> None:
        """Serve nothing."""
        if self.scope == "systemd":
            _run(["systemctl", "stop", self._unit()], "stopping the service")
            return
        pid = self._supervisor()
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + _STOP_S
        while keep_alive.started_ticks(pid) is not None:
            if time.monotonic() > end_s:
                os.kill(pid, signal.SIGKILL)
                end_s = time.monotonic() + _STOP_S
            time.sleep(_POLL_S)
        (self.places.run / "supervisor.json").unlink(missing_ok=True)

    def alive(self) -> bool:
        """Whether it is running or still tries to."""
        if self.scope == "systemd":
            done = subprocess.run(
                ["systemctl", "is-active", self._unit()],
                capture_output=True,
                text=True,
                check=False,
                timeout=_COMMAND_S,
            )
            return done.stdout.strip() in ("active", "activating", "reloading")
        return self._supervisor() is not None

    def last_words(self) -> str:
        """The last lines the agent wrote, for an error."""
        if self.scope == "systemd":
            command = ["journalctl", "-u", self._unit(), "-n", "15", "--no-pager", "-o", "cat"]
            try:
                done = subprocess.run(command, capture_output=True, timeout=20, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return ""
            return done.stdout.decode(errors="replace")[-2000:]
        try:
            return (self.places.run / "agent.log").read_bytes()[-2000:].decode(errors="replace")
        except OSError:
            return ""

    def _unit(self) -> str:
        return f"rl-pipeline-{self.places.agent}.service"

    def _restart_unit(self) -> None:
        install = self.places.app / "current" / "install.sh"
        command = [str(install), "--unit-only", "--root", str(self.places.root)]
        command += ["--python", self.python, "--port", str(self.port)]
        _run(command, "writing the service unit")
        _run(["systemctl", "daemon-reload"], "reloading systemd")
        _run(["systemctl", "enable", self._unit()], "enabling the service")
        _run(["systemctl", "reset-failed", self._unit()], "clearing failures", ignore=True)
        _run(["systemctl", "restart", self._unit()], "starting the service")

    def _start_process(self) -> None:
        run = self.places.run
        run.mkdir(exist_ok=True)
        script, log = run / "keep_alive.py", run / "agent.log"
        write_whole(script, self._source.encode())
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            os.replace(log, run / "agent.log.1")
        command = [sys.executable, "-S", "-E", "-B", str(script), "--app", str(self.places.app)]
        command += ["--python", self.python, "--port", str(self.port)]
        with log.open("ab") as output:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )
        end_s = time.monotonic() + _STOP_S
        while self._supervisor() is None:
            if time.monotonic() > end_s:
                raise DeviceError("service", f"the supervisor did not start; see {log}")
            time.sleep(_POLL_S)

    def _supervisor(self) -> "int | None":
        """Process id of the supervisor that runs now; a stale file, or a reused id, is none."""
        try:
            value = json.loads((self.places.run / "supervisor.json").read_bytes())
            pid, ticks = int(value["pid"]), value["started_ticks"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return pid if ticks is not None and keep_alive.started_ticks(pid) == ticks else None


def _run(command: "list[str]", what: str, *, ignore: bool = False) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError("service", f"{what} failed: {error}") from None
    if done.returncode != 0 and not ignore:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-1000:]
        raise DeviceError("service", f"{what} failed ({' '.join(command[:3])}): {said}")
