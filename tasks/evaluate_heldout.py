"""The evaluation stage as a Prefect task."""

from typing import Any

from prefect import task

from tasks.stage_task import run_stage, task_options


@task(**task_options("evaluation"))
def evaluate_heldout(stage: str, key: str, inputs: dict[str, Any], reuse: bool) -> dict[str, Any]:
    """Held-out evaluation of snapshot and policy; the promotion gate reads it."""
    return run_stage(stage, key, inputs, reuse)
