"""`python -m tasks.reaper PARENT_PID GRACE_S COMMAND…`: runs a command and ends all it started.

A process of its own, because only a child subreaper sees every orphan (Ray's agents make sessions
of their own and outlive their driver), and because it must outlive a killed pipeline: it is told
by the kernel when its parent ends, stops the command, kills what is left, and goes. PARENT_PID 0
is nobody: a service that outlives whoever started it goes on until it is told to stop.

Exit code: the command's, or 128 + the signal that ended it.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from tasks.process_tree import become_subreaper, descendants, die_with_parent, end_processes

_POLL_S = 0.05


class _Stop:
    """Set by the first SIGTERM, SIGINT or SIGHUP."""

    def __init__(self) -> None:
        self.requested = False
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True


def _reap() -> dict[int, int]:
    """Collect every child that has ended: pid and exit code (negative: the signal)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _wait(child_pid: int, stop: _Stop, grace_s: float) -> int:
    """The command's exit code; a stop gives it `grace_s` to end by itself."""
    asked_s: float | None = None
    while True:
        ended = _reap()
        if child_pid in ended:
            return ended[child_pid]
        if stop.requested and asked_s is None:
            asked_s = time.monotonic()
            os.kill(child_pid, signal.SIGTERM)
        if asked_s is not None and time.monotonic() - asked_s > grace_s:
            os.kill(child_pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _end_all() -> None:
    """Kill descendants until none is left: an orphan always comes back to us."""
    while left := descendants(os.getpid()):
        end_processes(left, signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)


def main(argv: list[str]) -> int:
    """Run the command; see the module's docstring."""
    parent_pid, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    stop = _Stop()
    become_subreaper()
    if parent_pid:
        die_with_parent(parent_pid, signal.SIGTERM)
    child = subprocess.Popen(command)
    code = child.returncode = _wait(child.pid, stop, grace_s)
    _end_all()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
