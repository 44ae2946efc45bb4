"""What the bundle says about its own making, handed in by the pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from configs.schema.pipeline import PipelineConfig

KEY_DIR = Path("runs/keys")


@dataclass(frozen=True)
class Limits:
    """Bounds of one request on the device."""

    max_new_tokens: int = 64
    """Per turn."""
    max_turns: int = 4
    max_request_bytes: int = 1 << 20
    turn_timeout_s: float = 300.0


@dataclass(frozen=True)
class BundleFacts:
    """Lineage and settings that no stage's folder holds."""

    profile: str
    base_model: str
    base_license: str
    """SPDX expression of the base model's licence."""
    git_sha: str
    git_dirty: bool = False
    mlflow_run_id: str | None = None
    mlflow_tracking_uri: str | None = None
    lineage: Mapping[str, str] = field(default_factory=dict)
    """Stage → sha256 of what it made; also `config` and `lock`."""
    system_prompt: str | None = None
    tools: tuple[str, ...] = ()
    limits: Limits = Limits()
    key_dir: Path = KEY_DIR
    license_file: Path | None = None
    """The base model's licence text; without it, the known text of `base_license`."""

    @staticmethod
    def from_config(
        config: PipelineConfig,
        *,
        git_sha: str,
        git_dirty: bool,
        lineage: Mapping[str, str],
        mlflow_run_id: str | None,
        mlflow_tracking_uri: str | None,
        key_dir: Path = KEY_DIR,
        license_file: Path | None = None,
    ) -> "BundleFacts":
        """Facts of a run: tools, prompt and limits as in training and evaluation."""
        sampling = config.evaluation.sampling
        return BundleFacts(
            profile=config.profile,
            base_model=_base_model(config),
            base_license=config.package.license,
            git_sha=git_sha,
            git_dirty=git_dirty,
            mlflow_run_id=mlflow_run_id,
            mlflow_tracking_uri=_without_password(mlflow_tracking_uri),
            lineage=dict(lineage),
            system_prompt=config.system_prompt,
            tools=config.tools,
            limits=Limits(sampling.max_new_tokens, sampling.max_turns),
            key_dir=key_dir,
            license_file=license_file,
        )


def _base_model(config: PipelineConfig) -> str:
    model = config.model
    if model.type == "scratch":
        return f"made from scratch (profile {config.profile})"
    if model.type == "pretrained":
        return Path(model.path).name if Path(model.path).is_absolute() else model.path
    return f"{model.package}/{model.file}"


def _without_password(uri: str | None) -> str | None:
    """A tracking address without the user and password in it: bundles leave the house."""
    if uri is None:
        return None
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
