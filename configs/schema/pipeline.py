"""The whole config of one run."""

from pydantic import Field, model_validator

from configs.schema.base import Config, Seed
from configs.schema.data import DataConfig
from configs.schema.deploy import DeployConfig
from configs.schema.evaluation import EvaluationConfig
from configs.schema.model import Model, ScratchModel
from configs.schema.operations import (
    AlertsConfig,
    NightlyConfig,
    PromotionConfig,
    RetentionConfig,
)
from configs.schema.package import CostConfig, PackageConfig, TrackingConfig
from configs.schema.quantize import QuantizeConfig
from configs.schema.rl import RLConfig
from configs.schema.sft import SFTConfig
from configs.schema.supervision import SupervisionConfig


class Requirements(Config):
    """What a machine must have for this profile; `rl-pipeline doctor` compares."""

    gpus: int = Field(0, ge=0)
    gpu_memory_gib: float = Field(0, ge=0)
    memory_gib: float = Field(6, ge=0)
    disk_gib: float = Field(6, ge=0)
    packages: tuple[str, ...] = ()
    """Import names beyond the locked environment."""


class PipelineConfig(Config):
    """One run, prompts to bundle."""

    seed: Seed = 0
    """Seed of the run; loading hands it to `data.seed`, `sft.seed` and `rl.seed` unless set."""
    profile: str = Field("calculator", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    system_prompt: str | None = None
    """Put before every conversation, in training and on the device alike."""
    tools: tuple[str, ...] = ("calc",)
    """Tools the agent may call; empty means single-turn."""
    hardware: str | None = None
    """Which of the profile's presets is taken, such as `4gpu`; None where it has none."""
    requires: Requirements = Requirements()
    data: DataConfig = DataConfig()
    model: Model = ScratchModel()
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    package: PackageConfig = PackageConfig()
    tracking: TrackingConfig = TrackingConfig()
    cost: CostConfig = CostConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    nightly: NightlyConfig = NightlyConfig()
    promotion: PromotionConfig = PromotionConfig()
    alerts: AlertsConfig = AlertsConfig()
    retention: RetentionConfig = RetentionConfig()
    deploy: DeployConfig = DeployConfig()

    @model_validator(mode="after")
    def _heldout_has_problems(self) -> "PipelineConfig":
        rows = getattr(self.data.source, "heldout_rows", None)
        if rows is not None and rows < self.evaluation.max_problems:
            raise ValueError(
                f"evaluation.max_problems={self.evaluation.max_problems} is above "
                f"data.source.heldout_rows={rows}; lower the first or raise the second"
            )
        return self
