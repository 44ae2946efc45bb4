"""One run at a time per runs folder.

The lock is the kernel's (`flock`), so a killed owner frees it by dying; the file says who holds
it. What a killed owner left running is ended by its mark before the next run starts.
"""

import fcntl
import json
import os
import time
from pathlib import Path

from tasks.artifacts.atomic import dump_json
from tasks.process_tree import end_marked

LOCK_NAME = "run.lock"


class RunLockedError(RuntimeError):
    """Another run uses the same runs folder."""


class RunLock:
    """Holds `runs/run.lock` for one run; use as a context manager."""

    def __init__(self, runs_dir: Path, run_id: str) -> None:
        self._path = runs_dir / LOCK_NAME
        self._run_id = run_id
        self._handle: int | None = None
        self.leftovers_ended = 0
        """Processes of a dead run that were still alive."""

    def __enter__(self) -> "RunLock":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(handle)
            os.close(handle)
            raise RunLockedError(
                f"run {owner.get('run_id', '?')} (process {owner.get('pid', '?')}) uses "
                f"{self._path.parent}; wait for it, stop it, or choose another runs folder"
            ) from None
        self._handle = handle
        dead = _owner(handle)  # a clean release leaves the file empty
        if "run_id" in dead:
            self.leftovers_ended = end_marked(str(dead["run_id"]))
        owner = {"run_id": self._run_id, "pid": os.getpid(), "since": time.time()}
        _write(handle, dump_json(owner))
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handle is not None:
            _write(self._handle, "")
            os.close(self._handle)
            self._handle = None


def _owner(handle: int) -> dict[str, object]:
    try:
        owner = json.loads(os.pread(handle, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
    os.fsync(handle)
