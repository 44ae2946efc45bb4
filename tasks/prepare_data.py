"""The data stage as a Prefect task."""

from typing import Any

from prefect import task

from tasks.stage_task import run_stage, task_options


@task(**task_options("data"))
def prepare_data(stage: str, key: str, inputs: dict[str, Any], reuse: bool) -> dict[str, Any]:
    """Data prep: sources to canonical rows, gated, held-out set frozen."""
    return run_stage(stage, key, inputs, reuse)
