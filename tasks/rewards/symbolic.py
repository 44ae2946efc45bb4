"""Compares expressions in a child process with a deadline, from any thread or process (A12)."""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

START_DEADLINE_S = 120.0
REPLY_DEADLINE_S = 10.0


class SymbolicError(RuntimeError):
    """The child could not tell; the answer stays unscored."""


class SymbolicComparer:
    """Owns one child, started on first use and again after a deadline, a crash or a fork."""

    def __init__(self, deadline_s: float = REPLY_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._pending = b""

    def parses(self, text: str) -> bool:
        """True where the grammar takes `text`."""
        return "parses" in self._ask({"ask": "parses", "left": text})

    def equal(self, left: str, right: str) -> bool:
        """Whether two expressions have the same value.

        Raises:
            SymbolicError: one cannot be read, the deadline passed, or the child died.
        """
        return self._decided({"ask": "equal", "left": left, "right": right})

    def proportional(self, left: str, right: str) -> bool:
        """Whether `left = 0` and `right = 0` are multiples of one another; raises as `equal`."""
        return self._decided({"ask": "proportional", "left": left, "right": right})

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _decided(self, request: dict[str, str]) -> bool:
        reply = self._ask(request)
        if "equal" not in reply:
            raise SymbolicError(str(reply.get("error", "no reply")))
        return bool(reply["equal"])

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        with self._lock:
            child = self._running()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
            except OSError as error:
                self._end()
                raise SymbolicError(f"the child went away: {error}") from error
            return self._reply(child, self._deadline_s)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is None:
            return self._child
        root = Path(__file__).resolve().parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tasks.rewards.symbolic_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._owner, self._pending = os.getpid(), b""
        self._reply(self._child, START_DEADLINE_S)
        return self._child

    def _reply(self, child: "subprocess.Popen[bytes]", deadline_s: float) -> dict[str, Any]:
        assert child.stdout is not None
        until_s = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    self._end()
                    raise SymbolicError(f"no reply within {deadline_s:g} s")
                chunk = os.read(child.stdout.fileno(), 65536)
                if not chunk:
                    self._end()
                    raise SymbolicError("the child died")
                self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return dict(json.loads(line))

    def _end(self) -> None:
        if self._child is not None and self._owner == os.getpid():
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
        self._child, self._pending = None, b""


@lru_cache(maxsize=1)
def comparer() -> SymbolicComparer:
    """The comparer of this process; it starts nothing until first asked."""
    return SymbolicComparer()
