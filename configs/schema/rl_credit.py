"""How rewards become advantages."""

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import Config


class GrpoCredit(Config):
    """(R − mean) / (sample std + eps) within the group (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    eps: float = Field(1e-6, gt=0)


class DrGrpoCredit(Config):
    """R − mean within the group, no division by std (arXiv 2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"


class TurnGaeCredit(Config):
    """GAE over turns with a value head on the shared trunk (arXiv 1506.02438, per turn)."""

    type: Literal["turn_gae"] = "turn_gae"
    gamma: float = Field(0.99, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    value_coefficient: float = Field(0.1, ge=0)
    normalise: bool = True
    """Centre and scale advantages over the batch."""


Credit = Annotated[GrpoCredit | DrGrpoCredit | TurnGaeCredit, Field(discriminator="type")]
