"""What samples the policy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Config


class _Sampler(Config):
    """What every engine can be told."""

    max_sequences: int = Field(256, ge=1)
    """Sequences sampled at once, at most."""
    on_publish: Literal["carry", "finish"] = "carry"
    """New weights amid an episode: `carry` samples its later tokens from them, each token keeping
    the version it came from; `finish` lets it end on the weights it began with."""


class TransformersEngineConfig(_Sampler):
    """Batched sampling with transformers; suits small models and CPUs."""

    type: Literal["transformers"] = "transformers"


class Concurrency(Config):
    """How many requests run at once, steered by the share of the key-value cache in use."""

    grow_below: float = Field(0.6, gt=0, lt=1)
    """Below this share a quarter more requests may run."""
    back_off_at: float = Field(0.8, gt=0, lt=1)
    """From this share on, a tenth fewer."""
    halve_at: float = Field(0.9, gt=0, le=1)
    """From this share on, half as many: vLLM is about to throw running requests out."""

    @model_validator(mode="after")
    def _in_order(self) -> "Concurrency":
        if not self.grow_below < self.back_off_at < self.halve_at:
            raise ValueError(
                f"rl.engine.concurrency: grow_below={self.grow_below}, back_off_at="
                f"{self.back_off_at} and halve_at={self.halve_at} must rise in this order"
            )
        return self


class VllmEngineConfig(_Sampler):
    """vLLM: paged attention, prefix caching, continuous batching, adapters swapped while it runs.

    The same settings serve a GPU and the CPU build; the latter takes one process, eagerly.
    """

    type: Literal["vllm"] = "vllm"
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs one engine is spread over."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that weights and key-value cache may take; a CPU ignores it."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Key-value cache, GiB; None takes what `gpu_memory_utilization` leaves, on a CPU 1 GiB."""
    max_batched_tokens: int = Field(4096, ge=32)
    """Tokens of one forward pass; longer prompts go through in chunks."""
    enforce_eager: bool = False
    """Without CUDA graphs: a faster start, slower tokens. A CPU is always eager."""
    colocated: bool = False
    """Generator and learner take turns on one GPU: vLLM gives its memory back while training runs
    (needs `rl.runtime.type=inline`)."""
    request_timeout_s: float = Field(600.0, gt=0)
    """A turn that takes longer is aborted, and counted."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Time to load and to compile."""
    concurrency: Concurrency = Concurrency()


Engine = Annotated[TransformersEngineConfig | VllmEngineConfig, Field(discriminator="type")]
