"""The package stage as a Prefect task."""

from typing import Any

from prefect import task

from tasks.stage_task import run_stage, task_options


@task(**task_options("package"))
def package_edge(stage: str, key: str, inputs: dict[str, Any], reuse: bool) -> dict[str, Any]:
    """The signed bundle for the device."""
    return run_stage(stage, key, inputs, reuse)
