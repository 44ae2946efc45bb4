"""Runs of the loop for the tests of the engine."""

import pytest
from loop_run import Run
from machine_time import machine_time
from sleepy_runtime import SleepyRuntime

__all__ = ["machine_time"]


@pytest.fixture
def run_of(tiny_config, tmp_path):
    """Build a run: `run_of(runtime, staleness_limit=2, …)`."""

    def build(runtime: SleepyRuntime, /, *, resume=False, folder=tmp_path, **rl) -> Run:
        settings = {
            "steps": 8,
            "checkpoint_every": 100,
            "staleness_limit": runtime.limit,
            "runtime": {"type": "ray", "rollout_workers": runtime.workers},
        } | rl
        return Run(tiny_config(rl=settings), runtime, folder, resume=resume)

    return build
