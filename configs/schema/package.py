"""Settings of the edge bundle and of what surrounds the run: tracking and cost."""

from pydantic import Field

from configs.schema.base import Config


class PackageConfig(Config):
    """The signed bundle."""

    name: str = Field("agent", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    prefer: tuple[str, ...] = ("Q4_K_M", "Q8_0", "IQ2_M", "Q5_K_M")
    """The first of these that ships becomes the bundle's default model file.

    `IQ2_M` takes a repaired `IQ2_M+3` too, where IQ2_M itself does not ship.
    """
    golden_prompts: int = Field(8, ge=1)
    l4t_min: str = "36.0"
    l4t_max_major: int = 36
    context_length: int = Field(512, ge=32)
    license: str = "Apache-2.0"


class TrackingConfig(Config):
    """MLflow."""

    experiment: str = "rl-pipeline"
    uri: str | None = None
    """None is the server of MLFLOW_TRACKING_URI, or else a SQLite file under the run folder."""
    max_artifact_mb: float = Field(64.0, ge=0)
    """Files up to this size are kept by MLflow itself; larger ones stand in the stage's manifest
    by hash, with their path."""


class CostConfig(Config):
    """Prices."""

    usd_per_device_hour: float = Field(0.05, ge=0)
    """One placement slot: a GPU, or here a CPU core."""
