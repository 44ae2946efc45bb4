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


class RlooCredit(Config):
    """R − mean of the others in the group: an unbiased baseline (arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"


class ReturnToGoCredit(Config):
    """Each turn's discounted return-to-go − mean of the others' that reached this turn."""

    type: Literal["return_to_go"] = "return_to_go"
    gamma: float = Field(0.99, gt=0, le=1)
    """Discount per turn; tokens are not discounted."""


class TurnGaeCredit(Config):
    """GAE over turns with a value head on the shared trunk (arXiv 1506.02438, per turn)."""

    type: Literal["turn_gae"] = "turn_gae"
    gamma: float = Field(0.99, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    value_coefficient: float = Field(0.1, ge=0)
    normalise: bool = True
    """Centre and scale advantages over the batch."""


GroupCredit = GrpoCredit | DrGrpoCredit | RlooCredit
"""Credits that compare a sample's whole reward with its group's."""

Credit = Annotated[GroupCredit | ReturnToGoCredit | TurnGaeCredit, Field(discriminator="type")]
