"""What a running pipeline tells whoever listens (the command line draws it)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "run_started",
    "stage_started",
    "stage_reused",
    "stage_finished",
    "stage_failed",
    "progress",
    "metrics",
    "note",
    "warning",
    "run_finished",
]


@dataclass(frozen=True)
class Event:
    """One thing that happened; `values` holds metrics, None where unknown."""

    kind: EventKind
    stage: str | None = None
    message: str = ""
    done: int | None = None
    total: int | None = None
    step: int | None = None
    values: Mapping[str, float | None] = field(default_factory=dict)


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of a run nobody watches."""
