"""Process trees on Linux: who belongs to whom, how much memory, and how all of it ends."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterable

import psutil

TOKEN_VARIABLE = "RL_PIPELINE_TOKEN"
"""Environment variable that every process of a run inherits: `<run>` or `<run>:<stage>`."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` when the parent ends; ends at once if it has already."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Orphans among our descendants become our children, whatever session they made."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[psutil.Process]:
    """Every living descendant of `pid`."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def end_processes(processes: Iterable[psutil.Process], signum: int) -> None:
    """Send `signum` to each; one that has gone meanwhile is fine."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signum)


def marked(token: str) -> list[psutil.Process]:
    """Processes whose environment carries `token`, of a run or of a stage (not ourselves)."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            mark = process.environ().get(TOKEN_VARIABLE, "")
            if mark == token or mark.startswith(f"{token}:"):
                found.append(process)
    return found


def end_marked(token: str, timeout_s: float = 10.0) -> int:
    """Kill what a dead run left behind; returns how many processes it was.

    Returns when they are gone, not when they can no longer be found: the kernel takes a dying
    process's environment, by which it is found, first.
    """
    ended: set[psutil.Process] = set()
    deadline_s = time.monotonic() + timeout_s
    while (left := marked(token)) and time.monotonic() < deadline_s:
        ended.update(left)
        end_processes(left, signal.SIGKILL)
        time.sleep(_POLL_S)
    while any(map(_runs, ended)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return len(ended)


def _runs(process: psutil.Process) -> bool:
    """Whether a process is still there (a zombie is not)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _pss(process: psutil.Process) -> int:
    """Proportional share of memory; RSS where the kernel does not say."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _rss(process)


def tree_bytes(pid: int, floor: int = 0) -> int:
    """Memory of `pid` and all its descendants, shared pages counted once (PSS).

    Where even the sum of RSS, which is never below it, stays under `floor`, PSS is not read and
    the RSS sum is returned: it cannot be a new peak.
    """
    try:
        processes = [psutil.Process(pid), *descendants(pid)]
    except psutil.NoSuchProcess:
        return 0
    upper = sum(_rss(process) for process in processes)
    if upper <= floor:
        return upper
    return sum(_pss(process) for process in processes)


class PeakSampler:
    """Keeps the peak memory of our own process tree; use as a context manager."""

    def __init__(self, period_s: float = 1.0) -> None:
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-sampler", daemon=True)
        self.peak_bytes = 0
        """Peak since the start."""
        self._since_mark = 0

    def __enter__(self) -> "PeakSampler":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def mark(self) -> None:
        """Start a new stretch (a stage)."""
        self._since_mark = 0

    @property
    def peak_since_mark(self) -> int | None:
        """Peak of the stretch; None where no sample fell into it."""
        return self._since_mark or None

    def _run(self) -> None:
        while True:
            now = tree_bytes(os.getpid(), floor=self._since_mark)
            self._since_mark = max(self._since_mark, now)
            self.peak_bytes = max(self.peak_bytes, now)
            if self._stop.wait(self._period_s):
                return
