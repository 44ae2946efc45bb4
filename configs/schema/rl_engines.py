"""What samples the policy."""

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import Config


class TransformersEngineConfig(Config):
    """Batched sampling with transformers; suits small models and CPUs."""

    type: Literal["transformers"] = "transformers"
    max_sequences: int = Field(256, ge=1)


class VllmEngineConfig(Config):
    """vLLM: paged attention, prefix caching, continuous batching."""

    type: Literal["vllm"] = "vllm"
    tensor_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    max_sequences: int = Field(256, ge=1)


Engine = Annotated[TransformersEngineConfig | VllmEngineConfig, Field(discriminator="type")]
