"""Runs one stage in a process tree of its own and ends all of it, whatever happens.

The tree hangs under `tasks.reaper`, so that descendants with sessions of their own end too: on
success, failure, deadline, a stage gone silent, Ctrl-C, or the death of this process.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema.supervision import SupervisionConfig
from tasks.artifacts import ArtifactRecord, write_json
from tasks.artifacts.progress import read_metrics
from tasks.artifacts.provenance import module_environment
from tasks.artifacts.store import StageFolder
from tasks.process_tree import TOKEN_VARIABLE, end_marked
from tasks.stage_process import StageRequest

POLL_S = 0.25
LOG_TAIL_LINES = 15
_TRANSIENT = frozenset({"ConnectionError", "TimeoutError", "ConnectionResetError"})

QUIET_ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
OFFLINE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class StageFailedError(RuntimeError):
    """A stage ended without a result; says which, why, what to do, and where its log is."""

    def __init__(
        self, stage: str, kind: str, message: str, advice: str, log_path: str, log_tail: str = ""
    ) -> None:
        super().__init__(stage, kind, message, advice, log_path, log_tail)
        self.stage, self.kind, self.message = stage, kind, message
        self.advice, self.log_path, self.log_tail = advice, log_path, log_tail

    def __str__(self) -> str:
        return f"stage {self.stage} failed ({self.kind}): {self.message}\n{self.advice}"

    @property
    def retryable(self) -> bool:
        """Whether the same again may end otherwise: the process was killed, or a peer was gone."""
        return self.kind == "Killed" or self.kind in _TRANSIENT


@dataclass(frozen=True)
class Progress:
    """What a stage said last."""

    done: int
    total: int
    message: str


@dataclass(frozen=True)
class Callbacks:
    """Who is told of progress and of new metric lines (`{"step", "time_s", "values"}`)."""

    progress: Callable[[Progress], None]
    metrics: Callable[[list[dict[str, Any]]], None]


class OutputTail:
    """Follows `progress.json` and `metrics.jsonl` of a stage folder.

    A resumed stage rewrites its metrics; time stamps tell which lines are new.
    """

    def __init__(self, out_dir: Path) -> None:
        self._progress_path = out_dir / "progress.json"
        self._metrics_path = out_dir / "metrics.jsonl"
        self._progress: Progress | None = None
        self._metrics_seen = (0, 0.0)
        self._last_time_s = float("-inf")

    def progress(self) -> Progress | None:
        """The progress, where it changed since the last look."""
        try:
            said = json.loads(self._progress_path.read_bytes())
            now = Progress(int(said["done"]), int(said["total"]), str(said["message"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if now == self._progress:
            return None
        self._progress = now
        return now

    def metrics(self) -> list[dict[str, Any]]:
        """Metric lines written since the last look."""
        try:
            stat = self._metrics_path.stat()
        except OSError:
            return []
        seen = (stat.st_size, stat.st_mtime)
        if seen == self._metrics_seen:
            return []
        self._metrics_seen = seen
        new = [m for m in read_metrics(self._metrics_path) if m["time_s"] > self._last_time_s]
        if new:
            self._last_time_s = max(m["time_s"] for m in new)
        return new


def stage_environment(token: str, *, offline: bool) -> dict[str, str]:
    """The environment of a stage process: telemetry off, marked with `token`."""
    extra = {**QUIET_ENVIRONMENT, **(OFFLINE_ENVIRONMENT if offline else {})}
    return {**module_environment(), **extra, TOKEN_VARIABLE: token}


def reaped_command(command: list[str], grace_s: float, *, detached: bool = False) -> list[str]:
    """`command` under the reaper, which ends with this process unless it is `detached`."""
    parent = 0 if detached else os.getpid()
    return [sys.executable, "-m", "tasks.reaper", str(parent), str(grace_s), *command]


def _silent_s(folder: StageFolder, started: float) -> float:
    """Seconds since the stage last wrote progress, a metric or a log line."""
    latest = started
    for path in (folder.path / "progress.json", folder.path / "metrics.jsonl", folder.log_path):
        with contextlib.suppress(OSError):
            latest = max(latest, path.stat().st_mtime)
    return time.time() - latest


def _stop(reaper: "subprocess.Popen[bytes]", grace_s: float, token: str) -> None:
    """End the tree; where the reaper itself was killed, find its orphans by their mark."""
    if reaper.poll() is None:
        reaper.send_signal(signal.SIGTERM)
        try:
            reaper.wait(timeout=grace_s + 20.0)
        except subprocess.TimeoutExpired:
            reaper.kill()
            reaper.wait()
    if reaper.returncode < 0:
        end_marked(token)


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, empty where there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def supervise(
    request: StageRequest,
    folder: StageFolder,
    limits: SupervisionConfig,
    callbacks: Callbacks,
    environment: dict[str, str],
) -> ArtifactRecord:
    """Run `request` and return its record.

    Raises:
        StageFailedError: the stage raised, was killed, ran past a limit, or left no result.
    """
    folder.control.mkdir(parents=True, exist_ok=True)
    for stale in (request.result, request.error):
        Path(stale).unlink(missing_ok=True)
    request_path = write_json(folder.control / "request.json", request.model_dump(mode="json"))
    stage_command = [sys.executable, "-m", "tasks.stage_process", str(request_path), "0"]
    with folder.log_path.open("ab") as log:
        reaper = subprocess.Popen(
            reaped_command(stage_command, limits.grace_s),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C comes to us; we end the tree in order
        )
        try:
            code = _follow(reaper, request.stage, folder, limits, callbacks)
        finally:
            _stop(reaper, limits.grace_s, environment[TOKEN_VARIABLE])
    return _result(request, folder, code)


def _follow(
    reaper: "subprocess.Popen[bytes]",
    stage: str,
    folder: StageFolder,
    limits: SupervisionConfig,
    callbacks: Callbacks,
) -> int:
    """Pass progress and metrics on until the tree ends; enforce the limits."""
    tail = OutputTail(folder.path)
    started, started_s = time.time(), time.monotonic()
    while True:
        code = reaper.poll()
        if (said := tail.progress()) is not None:
            callbacks.progress(said)
        if lines := tail.metrics():
            callbacks.metrics(lines)
        if code is not None:
            return code
        if time.monotonic() - started_s > limits.deadline_s:
            raise _limit_error(
                stage, folder, "Deadline", "supervision.deadline_s", limits.deadline_s
            )
        if _silent_s(folder, started) > limits.heartbeat_s:
            raise _limit_error(
                stage, folder, "Silent", "supervision.heartbeat_s", limits.heartbeat_s
            )
        time.sleep(POLL_S)


def _limit_error(
    stage: str, folder: StageFolder, kind: str, key: str, value: float
) -> StageFailedError:
    what = "ran longer" if kind == "Deadline" else "wrote no progress, metric or log line for more"
    return StageFailedError(
        stage,
        kind,
        f"{what} than {key}={value:g} s and was ended",
        f"raise {key}, or see {folder.log_path}; the next run goes on from the last checkpoint",
        str(folder.log_path),
        log_tail(folder.log_path),
    )


def _result(request: StageRequest, folder: StageFolder, code: int) -> ArtifactRecord:
    """The record a finished process left, or the error that names why there is none."""
    log = str(folder.log_path)
    if code == 0 and Path(request.result).exists():
        return ArtifactRecord.model_validate_json(Path(request.result).read_bytes())
    tail = log_tail(folder.log_path)
    advice = f"mend that and run again: finished stages are reused; full log: {log}"
    try:
        error = json.loads(Path(request.error).read_bytes())
        kind, message = str(error["type"]), str(error["message"])
    except (OSError, ValueError, KeyError, TypeError):
        if code > 128 or code < 0:
            name = signal.Signals(code - 128 if code > 128 else -code).name
            advice = (
                "if the machine ran out of memory, lower the batch size or free some; run again: "
                f"finished stages are reused and RL goes on from its checkpoint; log: {log}"
            )
            kind, message = "Killed", f"its process was ended by {name}"
        else:
            kind, message = "NoResult", f"its process exited with {code} and left no result"
    raise StageFailedError(request.stage, kind, message, advice, log, tail)
