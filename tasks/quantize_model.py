"""The quantize stage as a Prefect task."""

from typing import Any

from prefect import task

from tasks.stage_task import run_stage, task_options


@task(**task_options("quantize"))
def quantize_model(stage: str, key: str, inputs: dict[str, Any], reuse: bool) -> dict[str, Any]:
    """GGUF, importance matrix, quantisations and their parity."""
    return run_stage(stage, key, inputs, reuse)
