"""The pipeline with the tiny stages, in a folder of its own."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_stages

from configs.schema import PipelineConfig
from tasks.events import Event

HERE = Path(__file__).parent


@pytest.fixture
def tiny_pipeline(tmp_path, monkeypatch):
    """Run the real flow over the tiny stages; returns `(summary, events)`."""
    from flows.launch import run_pipeline
    from tasks import stages

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    for name, spec in tiny_stages.specs().items():
        monkeypatch.setitem(stages.STAGES, name, spec)

    def run(config: PipelineConfig | None = None, **options) -> tuple[dict, list[Event]]:
        events: list[Event] = []
        path = run_pipeline(config or PipelineConfig(), on_event=events.append, **options)
        return json.loads(path.read_bytes()), events

    return run


@pytest.fixture
def behave(monkeypatch) -> Callable[..., None]:
    """Tell tiny stages to misbehave: `behave(rl="hang")`."""

    def tell(**what: str) -> None:
        monkeypatch.setenv(tiny_stages.BEHAVIOUR, json.dumps(what))

    return tell


def pid_lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X") and os.path.exists(f"/proc/{pid}")
