"""The rl stage as a Prefect task."""

from typing import Any

from prefect import task

from tasks.stage_task import run_stage, task_options


@task(**task_options("rl"))
def train_rl(stage: str, key: str, inputs: dict[str, Any], reuse: bool) -> dict[str, Any]:
    """Asynchronous RL: the policy, from the snapshot; a killed run goes on from its checkpoint."""
    return run_stage(stage, key, inputs, reuse)
