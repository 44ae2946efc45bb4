"""Where generator and learner run."""

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import Config


class InlineRuntime(Config):
    """One process, strictly alternating where the staleness limit is 0; deterministic on CPU."""

    type: Literal["inline"] = "inline"


class RayRuntime(Config):
    """Generator and learner as Ray actors, on this machine or a cluster."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """Address of a running cluster; None starts Ray here, on loopback only."""
    rollout_workers: int = Field(1, ge=1)
    rollout_threads: int = Field(1, ge=1)
    learner_threads: int = Field(1, ge=1)
    start_timeout_s: float = Field(120.0, gt=0)


Runtime = Annotated[InlineRuntime | RayRuntime, Field(discriminator="type")]
