"""Where generator and learner run."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Config

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]")
"""A name, an address, or one of IPv6 in brackets."""
_PORT = re.compile(r"[0-9]{1,5}")


class InlineRuntime(Config):
    """One process, strictly alternating where the staleness limit is 0; deterministic on CPU."""

    type: Literal["inline"] = "inline"


class RayRuntime(Config):
    """Generator and learner as Ray actors, on this machine or a cluster."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """`HOST:PORT` of a running cluster, `auto` for the one this machine belongs to; None starts Ray
    here, on loopback only."""
    rollout_workers: int = Field(1, ge=1)
    """Processes that sample, each with an engine of its own."""
    rollout_threads: int = Field(1, ge=1)
    """CPU threads, and CPUs it reserves, of one rollout worker."""
    learner_ranks: int = Field(1, ge=1)
    """Processes that train as one; each takes its share of a batch."""
    learner_threads: int = Field(1, ge=1)
    """CPU threads, and CPUs it reserves, of one learner rank."""
    grader_workers: int = Field(0, ge=0)
    """Processes that only grade; 0 grades beside the rollout worker that played."""
    gpus_per_rollout: float = Field(0.0, ge=0)
    """GPUs a rollout worker reserves: whole ones, or a share of one below 1."""
    gpus_per_learner: float = Field(0.0, ge=0)
    """GPUs a learner rank reserves: whole ones, or a share of one below 1."""
    placement: Literal["pack", "spread"] = "pack"
    """Fill one node after another, or spread processes over nodes, where there is more than one."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Time to reach the cluster, to place every process, and for a replacement to come up."""
    max_worker_losses: int = Field(3, ge=0)
    """Rollout workers that may die and be replaced before the run ends, resumably."""

    @model_validator(mode="after")
    def _gpus_divide(self) -> "RayRuntime":
        for key in ("gpus_per_rollout", "gpus_per_learner"):
            gpus = getattr(self, key)
            if gpus > 1 and gpus != int(gpus):
                raise ValueError(
                    f"rl.runtime.{key}={gpus:g} is neither a whole number of GPUs nor a share of "
                    f"one; try {int(gpus)}"
                )
        return self

    @model_validator(mode="after")
    def _address_is_of_a_cluster(self) -> "RayRuntime":
        if self.address in (None, "auto"):
            return self
        host, _, port = str(self.address).rpartition(":")
        if not (_HOST.fullmatch(host) and _PORT.fullmatch(port) and 0 < int(port) < 65536):
            raise ValueError(
                f"rl.runtime.address={self.address} is neither HOST:PORT nor auto; write what "
                "`ray start --head` printed, such as 10.0.0.1:6379 (a ray:// client cannot run "
                "here: join its machine with `ray start --address=HOST:PORT` instead)"
            )
        return self


Runtime = Annotated[InlineRuntime | RayRuntime, Field(discriminator="type")]
