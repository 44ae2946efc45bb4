"""One run at a time per runs folder.

The lock is the kernel's (`flock`), so a killed owner frees it by dying; the file says who holds
it, since when, and when the holder last showed itself. What a killed owner left running is ended
by its mark before the next run starts.
"""

import fcntl
import json
import os
import threading
import time
from pathlib import Path

from tasks.artifacts.atomic import dump_json
from tasks.process_tree import end_marked
from tasks.tracking.tracker import owner_tags

LOCK_NAME = "run.lock"
HEARTBEAT_S = 10.0


class RunLockedError(RuntimeError):
    """Another run uses the same runs folder."""


class RunLock:
    """Holds `runs/run.lock` for one run; use as a context manager, or `acquire` it first."""

    def __init__(self, runs_dir: Path, run_id: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._path = runs_dir / LOCK_NAME
        self._run_id = run_id
        self._heartbeat_s = heartbeat_s
        self._handle: int | None = None
        self._since = 0.0
        self._let_go = threading.Event()
        self._beat: threading.Thread | None = None
        self.leftovers_ended = 0
        """Processes of a dead run that were still alive."""

    def acquire(self) -> "RunLock":
        """Take the lock.

        Raises:
            RunLockedError: another run holds it; says which.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(handle)
            os.close(handle)
            raise RunLockedError(_held_by(owner, self._path.parent)) from None
        self._handle = handle
        dead = _owner(handle)  # a clean release leaves the file empty
        if "run_id" in dead:
            self.leftovers_ended = end_marked(str(dead["run_id"]))
        self._since = time.time()
        _write(handle, self._text(owner_tags(), self._since))
        self._beat = threading.Thread(target=self._show_life, name="run-lock", daemon=True)
        self._beat.start()
        return self

    def __enter__(self) -> "RunLock":
        return self if self._handle is not None else self.acquire()

    def __exit__(self, *exc: object) -> None:
        if self._handle is None or self._beat is None:
            return
        self._let_go.set()
        self._beat.join()
        _write(self._handle, "")
        os.close(self._handle)
        self._handle = None

    def _text(self, owner: dict[str, str], now: float) -> str:
        """Who holds it; as long as it is held, every text has the same length."""
        body = {
            "run_id": self._run_id,
            "pid": int(owner["owner.pid"]),
            "host": owner["owner.host"],
            "started": owner["owner.started"],
            "since": f"{self._since:.3f}",
            "heartbeat": f"{now:.3f}",
        }
        return dump_json(body)

    def _show_life(self) -> None:
        """Write the time every few seconds, in one write of the same length: never half-read."""
        owner = owner_tags()
        while not self._let_go.wait(self._heartbeat_s):
            if self._handle is not None:
                os.pwrite(self._handle, self._text(owner, time.time()).encode(), 0)


def lock_owner(runs_dir: Path) -> dict[str, object]:
    """What stands in the lock: who holds it, or who held it when it died; empty where nobody."""
    try:
        return _parse((runs_dir / LOCK_NAME).read_bytes())
    except OSError:
        return {}


def _held_by(owner: dict[str, object], folder: Path) -> str:
    try:
        age_s = time.time() - float(str(owner["heartbeat"]))
        seen = f" (last seen {age_s:.0f} s ago)"
    except (KeyError, ValueError):
        seen = ""
    host = owner.get("host", os.uname().nodename)
    where = "" if host == os.uname().nodename else f" on {host}"
    holder = f"run {owner.get('run_id', '?')} (process {owner.get('pid', '?')}{where})"
    return f"{holder} uses {folder}{seen}; wait for it, stop it, or choose another runs folder"


def _owner(handle: int) -> dict[str, object]:
    return _parse(os.pread(handle, 4096, 0))


def _parse(raw: bytes) -> dict[str, object]:
    try:
        owner = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
    os.fsync(handle)
