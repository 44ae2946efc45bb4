"""Settings of supervised fine-tuning, which makes the frozen reference snapshot."""

from pydantic import Field

from configs.schema.base import Config, Seed
from configs.schema.training import DeepSpeedSettings, FullWeights, Optimiser, Trainable


class SFTConfig(Config):
    """SFT: loss on policy tokens only, EOS trained, result merged, hashed and frozen."""

    steps: int = Field(400, ge=0)
    """Optimiser steps; 0 freezes the base model as it is."""
    batch_size: int = Field(64, ge=1)
    trainable: Trainable = FullWeights()
    optimiser: Optimiser = Optimiser(lr=1e-3, decay="linear", warmup_steps=20)
    deepspeed: DeepSpeedSettings = DeepSpeedSettings()
    seed: Seed = 0
