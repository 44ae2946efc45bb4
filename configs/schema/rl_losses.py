"""The policy loss."""

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import Config


class PpoClip(Config):
    """PPO clip on π_θ/μ with clip-higher and dual clip (arXiv 1707.06347, 2503.14476)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(3.0, gt=1)
    aggregation: Literal["token_mean", "constant"] = "token_mean"
    """`constant` divides by batch × max_new_tokens (Dr. GRPO); both denominators are global."""


Loss = Annotated[PpoClip, Field()]
