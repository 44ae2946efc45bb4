"""The base of every config class: frozen, strict about names, finite numbers only."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What every random generator here takes."""


class Config(BaseModel):
    """A frozen block of settings; an unknown key, NaN or infinity is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


LOWEST_TEMPERATURE = 0.01
"""Below it one token takes all the probability there is, and the others' logprobs overflow."""
