"""The champion met by a candidate, as a Prefect task."""

from typing import Any

from prefect import task

from tasks.stage_task import run_stage, task_options


@task(**task_options("challenge"))
def challenge_champion(stage: str, key: str, inputs: dict[str, Any], reuse: bool) -> dict[str, Any]:
    """Both shipped files answer the same held-out problems."""
    return run_stage(stage, key, inputs, reuse)
