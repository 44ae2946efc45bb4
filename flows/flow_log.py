"""What a flow run's log says of the pipeline: `--watch` and Prefect's pages show it live."""

import logging
import time
from collections.abc import Callable

from rich.markup import escape

from tasks.events import Event
from tasks.stages import STAGES

PROGRESS_PERIOD_S = 10.0
"""Progress inside a stage is said this often."""
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class FlowLog:
    """A listener that writes each stage's start, progress and end to a logger."""

    def __init__(self, logger: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._started_s: dict[str, float] = {}
        self._said_s = float("-inf")

    def __call__(self, event: Event) -> None:
        """Take one event; metrics are MLflow's."""
        say = getattr(self, f"_{event.kind}", None)
        if say is not None:
            say(event, _place(event.stage))

    def _say(self, level: int, text: str) -> None:
        self._logger.log(level, "%s", harmless(text))

    def _run_started(self, event: Event, place: str) -> None:
        self._say(logging.INFO, f"run {event.message}")

    def _stage_started(self, event: Event, place: str) -> None:
        self._started_s[event.stage or ""] = self._said_s = self._clock()
        self._say(logging.INFO, f"{place} starts: {event.message}")

    def _stage_reused(self, event: Event, place: str) -> None:
        self._say(logging.INFO, f"{place} {event.message}")

    def _progress(self, event: Event, place: str) -> None:
        last = event.total is not None and event.done == event.total
        if not last and self._clock() - self._said_s < PROGRESS_PERIOD_S:
            return
        self._said_s = self._clock()
        self._say(logging.INFO, f"{place} {event.done}/{event.total} {event.message}".rstrip())

    def _stage_finished(self, event: Event, place: str) -> None:
        started_s = self._started_s.pop(event.stage or "", None)
        took = "" if started_s is None else f" in {self._clock() - started_s:.1f} s"
        self._say(logging.INFO, f"{place} done{took}: {event.message}")

    def _stage_failed(self, event: Event, place: str) -> None:
        self._say(logging.ERROR, f"{place} failed: {event.message}")

    def _note(self, event: Event, place: str) -> None:
        self._say(logging.INFO, f"{place} {event.message}".strip())

    def _warning(self, event: Event, place: str) -> None:
        self._say(logging.WARNING, event.message)

    def _run_finished(self, event: Event, place: str) -> None:
        self._say(logging.INFO, f"summary: {event.message}")


def harmless(text: str) -> str:
    """Text for a terminal and for Prefect's `--watch`, which prints log lines as Rich markup.

    It may come from a model: control characters become spaces, markup is escaped.
    """
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return escape(shown)


def _place(stage: str | None) -> str:
    """`stage 3/6 rl`; what runs beside the stages, by its name."""
    names = list(STAGES)
    if stage in names:
        return f"stage {names.index(stage) + 1}/{len(names)} {stage}"
    return stage or ""
