"""Settings that SFT and RL share: adapter, optimiser, DeepSpeed."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from configs.schema.base import Config

PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)
"""Linear layers of a decoder layer of Llama, Qwen2 and Qwen3."""


class Lora(Config):
    """Low-rank adapters on named projections."""

    type: Literal["lora"] = "lora"
    r: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] = Field(("q_proj", "v_proj"), min_length=1)


class FullWeights(Config):
    """Every weight is trained."""

    type: Literal["full"] = "full"


Trainable = Annotated[Lora | FullWeights, Field(discriminator="type")]


class Optimiser(Config):
    """AdamW with linear warm-up, then constant or linear decay."""

    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    warmup_steps: int = Field(5, ge=0)
    decay: Literal["constant", "linear"] = "constant"
    """`linear` falls to a tenth of `lr` at the last step."""
    max_skipped_in_a_row: int = Field(3, ge=1)
    """Consecutive non-finite steps that abort the run."""

    @field_validator("betas")
    @classmethod
    def _betas_decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"betas={list(betas)}: AdamW's two decays must each be at least 0 and below 1; "
                "0.9 and 0.95 are usual"
            )
        return betas


class PolicyOptimiser(Optimiser):
    """The optimiser of RL, whose batches are worth more or less."""

    scale_by_ess: bool = False
    """Multiply the step's learning rate by the square root of the ESS share of its raw sequence
    weights (arXiv 2602.17616, its rule for Adam): steps whose samples the policy has drifted away
    from are short."""


class DeepSpeedSettings(Config):
    """What goes into the DeepSpeed config."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is split over learner ranks: 1 optimiser state, 2 gradients too, 3 weights too."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens a forward pass may compute; a batch is cut into micro-batches by length."""
    micro_batching: Literal["packed", "bucketed"] = "packed"
    """`packed` lays real tokens end to end, so that layers compute no padding; `bucketed` pads
    samples of similar length, for models whose attention cannot be packed."""
    gradient_checkpointing: bool = False
    """Compute layers anew in the backward pass instead of keeping what they made: about a third
    more time for a fraction of the memory."""
    logits_chunk_tokens: int | None = Field(None, ge=1)
    """Make the logits of so many tokens at a time, and again in the backward pass; null makes them
    all at once. With a large vocabulary they are most of the memory."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of the learner; None lets the runtime share the cores out."""

    @model_validator(mode="after")
    def _ranks_call_alike(self) -> "DeepSpeedSettings":
        if self.zero_stage == 3 and self.logits_chunk_tokens is not None:
            raise ValueError(
                f"deepspeed.logits_chunk_tokens={self.logits_chunk_tokens} with "
                "deepspeed.zero_stage=3: ranks with unlike numbers of chunks would wait for each "
                "other for ever; set it to null and lower deepspeed.micro_batch_tokens, or use "
                "zero_stage 2"
            )
        return self
