"""One run's line to MLflow. The pipeline never waits for it and never fails because of it.

What the store does not take goes to `mlflow_pending.jsonl` in the run's folder, in order; every
later operation queues behind it, and `retry` (before each stage and at the end) says them all as
soon as the store answers.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.artifacts import write_atomic
from tasks.artifacts.atomic import dump_json
from tasks.tracking.operations import Operation, Speaker
from tasks.tracking.reachable import prepare_environment, why_unreachable

PENDING_NAME = "mlflow_pending.jsonl"
logger = logging.getLogger(__name__)


class TrackingUploadError(RuntimeError):
    """The store still does not take what is pending; nothing of it is lost."""


def store_errors() -> tuple[type[Exception], ...]:
    """What a store that cannot be used raises."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, OSError)


class Tracker:
    """Says operations to MLflow, or writes down the ones it could not say."""

    def __init__(self, speaker: Speaker, run_dir: Path) -> None:
        prepare_environment()
        self.speaker = speaker
        self._pending_path = run_dir / PENDING_NAME
        self._pending: list[Operation] = []
        self.problem: str | None = None
        """Why the store is not used now."""
        self.spent_s = 0.0
        """Time spent talking to MLflow, its import included."""

    @property
    def uri(self) -> str:
        """The store."""
        return self.speaker.uri

    @property
    def pending(self) -> int:
        """Operations written down and not said."""
        return len(self._pending)

    def run_id(self, run: str) -> str | None:
        """MLflow's id of one of our runs; None where the store has not taken it."""
        return self.speaker.ids.get(run)

    def knows(self, run_id: str) -> bool:
        """Whether the store holds this MLflow run; False where it cannot be asked."""
        with self.clock():
            if self._pending or why_unreachable(self.speaker.uri) is not None:
                return False
            try:
                self.speaker.client.get_run(run_id)
            except store_errors():
                return False
            return True

    def say(self, *operations: Operation) -> None:
        """Say operations, or write them down where the store does not answer."""
        with self.clock():
            for number, operation in enumerate(operations):
                if self._pending or not self._said(operation):
                    self._write_down(list(operations[number:]))
                    return

    def retry(self) -> None:
        """Say what is pending, if the store answers again."""
        with self.clock():
            while self._pending and self._said(self._pending[0]):
                self._pending.pop(0)
            self._keep_pending()
            if not self._pending:
                self.problem = None

    def _said(self, operation: Operation) -> bool:
        problem = why_unreachable(self.speaker.uri)
        if problem is None:
            try:
                self.speaker.say(operation)
                return True
            except store_errors() as error:
                problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self.problem is None:
            logger.warning("MLflow does not answer, the run goes on without it: %s", problem)
        self.problem = problem
        return False

    def _write_down(self, operations: list[Operation]) -> None:
        self._pending += operations
        if len(self._pending) == len(operations):
            self._keep_pending()
            return
        with self._pending_path.open("a", encoding="utf-8") as file:
            file.write("".join(dump_json(operation) + "\n" for operation in operations))

    def _keep_pending(self) -> None:
        write_pending(self._pending_path, self.speaker, self._pending)

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Count the time inside as spent on MLflow."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.spent_s += time.monotonic() - start_s


def write_pending(path: Path, speaker: Speaker, operations: list[Operation]) -> None:
    """Keep `operations` at `path` behind a line that says where they belong; none: no file."""
    if not operations:
        path.unlink(missing_ok=True)
        return
    head = {"op": "store", "uri": speaker.uri, "experiment": speaker.experiment, "ids": speaker.ids}
    write_atomic(path, "".join(dump_json(line) + "\n" for line in [head, *operations]))


def read_pending(path: Path) -> tuple[dict[str, Any], list[Operation]]:
    """The store line and the operations; a line cut off by a kill is left out."""
    lines = []
    for raw in path.read_bytes().split(b"\n"):
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(raw))
    return lines[0], lines[1:]


def upload_pending(run_dir: Path, uri: str | None = None) -> int:
    """Say what a run could not say; returns how many operations, 0 where none were pending.

    `uri` names another store than the run's own. What the store takes leaves the file at once, so
    that an upload broken off goes on where it stopped.

    Raises:
        TrackingUploadError: the store does not answer; the rest stays in the file.
    """
    path = run_dir / PENDING_NAME
    if not path.exists():
        return 0
    head, operations = read_pending(path)
    artifacts = None if (uri or head["uri"]).startswith("http") else local_artifacts(run_dir.parent)
    speaker = Speaker(uri or head["uri"], head["experiment"], artifacts, head["ids"])
    prepare_environment()
    said = 0
    for operation in operations:
        problem = why_unreachable(speaker.uri)
        if problem is None:
            try:
                speaker.say(operation)
            except store_errors() as error:
                problem = str(error)
        if problem is not None:
            raise TrackingUploadError(
                f"{said} of {len(operations)} operations uploaded, the rest stays in {path}: "
                f"{problem}; make the store at {speaker.uri} answer and upload again"
            )
        said += 1
        write_pending(path, speaker, operations[said:])
    return said


def local_artifacts(runs: Path) -> str:
    """Where artefacts of a local store lie."""
    return (runs / "mlartifacts").resolve().as_uri()


def default_uri(runs: Path) -> str:
    """The local store."""
    return f"sqlite:///{(runs / 'mlflow.db').resolve()}"


def open_tracker(runs: Path, run_dir: Path, experiment: str, uri: str | None) -> Tracker:
    """The tracker of one run: the store of the config, else MLFLOW_TRACKING_URI, else local."""
    resolved = uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(runs)
    artifacts = None if resolved.startswith("http") else local_artifacts(runs)
    return Tracker(Speaker(resolved, experiment, artifacts), run_dir)


def reading_speaker(runs: Path) -> Speaker | None:
    """For questions only: the configured store, else the local one where there is one."""
    configured = os.environ.get("MLFLOW_TRACKING_URI")
    if not configured and not (runs / "mlflow.db").exists():
        return None
    prepare_environment()
    return Speaker(configured or default_uri(runs), "rl-pipeline", None)


def owner_tags() -> dict[str, str]:
    """Tags by which a later run tells that the owner of an open run is dead."""
    import psutil

    process = psutil.Process(os.getpid())
    return {
        "owner.pid": str(process.pid),
        "owner.started": f"{process.create_time():.2f}",
        "owner.host": os.uname().nodename,
    }
