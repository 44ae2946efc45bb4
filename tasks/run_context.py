"""What the tasks of one run share in this process: config, folders, tracker, listener, clocks."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs.schema import PipelineConfig
from tasks.artifacts import ArtifactRecord
from tasks.events import Event, Listener
from tasks.process_tree import PeakSampler
from tasks.tracking.tracker import Tracker

StageStatus = Literal["completed", "failed", "cancelled"]


@dataclass
class StageOutcome:
    """How one stage of this run went."""

    stage: str
    status: StageStatus
    cached: bool
    wall_s: float
    """Time it took in this run; for a reused stage, the time to verify it."""
    record: ArtifactRecord | None = None
    error: str | None = None
    made_in_s: float | None = None
    """Time it took when it was made."""
    peak_tree_bytes: int | None = None


@dataclass
class RunContext:
    """One run."""

    config: PipelineConfig
    run_id: str
    runs_dir: Path
    tracker: Tracker
    sampler: PeakSampler
    listener: Listener
    facts: dict[str, Any] = field(default_factory=dict)
    """Git state, MLflow run and the like, handed to stages that write them down."""
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    promotion: dict[str, Any] | None = None
    """What was decided of the packaged release; None where nothing was."""
    night: dict[str, Any] | None = None
    """What a night took in and starts from; None by day."""
    prefect_s: float = 0.0
    """Time spent in Prefect rather than in work."""
    body_s: float = 0.0
    """Time the bodies of the stage task now called took."""

    @property
    def run_dir(self) -> Path:
        """This run's own folder."""
        return self.runs_dir / self.run_id

    @property
    def store(self) -> Path:
        """Stage outputs of all runs, by cache key."""
        return self.runs_dir / "store"

    def records(self) -> dict[str, ArtifactRecord]:
        """What the stages made so far."""
        return {o.stage: o.record for o in self.outcomes.values() if o.record}

    def tell(self, event: Event) -> None:
        """Pass an event to the listener; a warning is kept for the summary."""
        if event.kind == "warning":
            self.warnings.append(event.message)
        self.listener(event)

    def in_prefect(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into Prefect on the clock."""
        start_s = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            self.prefect_s += time.monotonic() - start_s


_CURRENT: ContextVar[RunContext] = ContextVar("rl_pipeline_run")


def current_run() -> RunContext:
    """The run this code is part of.

    Raises:
        LookupError: a stage task was called outside the pipeline's flow.
    """
    return _CURRENT.get()


@contextlib.contextmanager
def entered(run: RunContext) -> Iterator[RunContext]:
    """Make `run` the current one."""
    token = _CURRENT.set(run)
    try:
        yield run
    finally:
        _CURRENT.reset(token)
