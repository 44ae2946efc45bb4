"""The base of every config class: frozen, strict about names, finite numbers only."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen block of settings; an unknown key, NaN or infinity is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
