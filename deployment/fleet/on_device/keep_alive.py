"""Keeps an agent running on a device without systemd (service scope `process`).

Standard library only, Python 3.10. Left on the device as `run/keep_alive.py`:

    python3 -S -E -B keep_alive.py --app DIR --python /path/to/venv/bin/python --port N

Writes `run/supervisor.json` (process id and start), starts what `current` names, starts it again
when it ends, and gives up after three failures in a row. SIGTERM ends both; an agent never outlives
its supervisor, however that ends.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

MAX_FAILURES = 3
SETTLED_S = 60.0
"""An agent that ran this long counts as started."""
_PAUSE_S = 1.0
_STOP_S = 15.0
_PR_SET_PDEATHSIG = 1


def started_ticks(pid: int) -> "int | None":
    """When a process started, in clock ticks after boot; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _command(app: Path, python: str, port: int) -> "list[str]":
    current = (app / "current").resolve()
    command = [sys.executable, "-S", "-E", "-B", str(current / "agent.py")]
    return [*command, "--bundle", str(current), "--python", python, "--port", str(port)]


def _write_pid(path: Path) -> None:
    value = {"pid": os.getpid(), "started_ticks": started_ticks(os.getpid())}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


def keep_alive(app: Path, python: str, port: int) -> int:
    """Run until told to stop (0) or until the agent will not start (1)."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _write_pid(app / "run" / "supervisor.json")
    failures = 0
    while not stop.is_set():
        begun_s = time.monotonic()
        agent = subprocess.Popen(
            _command(app, python, port), stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
        )
        while agent.poll() is None and not stop.wait(0.1):
            pass
        if stop.is_set():
            break
        failures = 1 if time.monotonic() - begun_s > SETTLED_S else failures + 1
        sys.stderr.write(f"keep_alive: the agent ended ({agent.returncode})\n")
        if failures >= MAX_FAILURES:
            sys.stderr.write("keep_alive: giving up\n")
            return 1
        stop.wait(_PAUSE_S)
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
    return 0


def main(argv: "list[str] | None" = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--app", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    return keep_alive(options.app, options.python, options.port)


if __name__ == "__main__":
    sys.exit(main())
