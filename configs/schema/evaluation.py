"""Settings of held-out evaluation and the promotion gate."""

from pydantic import Field, model_validator

from configs.schema.base import LOWEST_TEMPERATURE, Config, Seed


class EvaluationSampling(Config):
    """The one block used for snapshot, policy and every quantisation."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy; above it, 0.01 is the least."""
    max_new_tokens: int = Field(64, ge=1)
    """Per turn."""
    max_turns: int = Field(2, ge=1)
    samples: int = Field(4, ge=1)
    """Samples per problem; stability is the share of problems answered the same way by all."""
    seed: Seed = 1234

    @model_validator(mode="after")
    def _greedy_or_drawn(self) -> "EvaluationSampling":
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature:g} must be 0, which is greedy, or "
                f"{LOWEST_TEMPERATURE} or above"
            )
        return self


class PromotionGate(Config):
    """What the policy must show against the snapshot to go on."""

    min_delta_ci_low: float = Field(0.0, ge=-1, le=1)
    """Lower end of the paired 95 % interval of accuracy, policy minus snapshot."""
    max_truncated_share: float = Field(0.2, ge=0, le=1)
    stop_on_failure: bool = False
    """True stops the run; False packages the policy as a candidate and says so."""


class DriftAlarms(Config):
    """Signs of reward hacking the report puts before a person; they stop nothing."""

    max_length_ratio: float = Field(2.0, gt=1)
    """Mean answer length of policy and snapshot, the longer over the shorter."""
    max_format_drop: float = Field(0.05, ge=0, le=1)
    """Share of readable answers, snapshot minus policy."""
    max_train_heldout_gap: float = Field(0.15, ge=0, le=1)
    """Accuracy on the last training groups minus held-out accuracy."""


class EvaluationConfig(Config):
    """Held-out evaluation."""

    sampling: EvaluationSampling = EvaluationSampling()
    max_problems: int = Field(512, ge=1)
    bootstrap_resamples: int = Field(2000, ge=100)
    gate: PromotionGate = PromotionGate()
    drift: DriftAlarms = DriftAlarms()
