"""The sft stage as a Prefect task."""

from typing import Any

from prefect import task

from tasks.stage_task import run_stage, task_options


@task(**task_options("sft"))
def train_sft(stage: str, key: str, inputs: dict[str, Any], reuse: bool) -> dict[str, Any]:
    """SFT: the frozen reference snapshot."""
    return run_stage(stage, key, inputs, reuse)
