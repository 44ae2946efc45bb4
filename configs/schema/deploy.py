"""Settings of deployment to devices, and of what comes back from them."""

from pydantic import Field

from configs.schema.base import Config


class DeployConfig(Config):
    """How a bundle is taken to devices."""

    devices: str = "configs/devices.yaml"
    """File of devices, relative to the working directory; the first device is the canary."""
    wave_size: int = Field(4, ge=1)
    """Devices at once, after the first (the canary) is healthy."""
    min_tokens_per_s: float = Field(1.0, ge=0)
    """Under this speed a device goes back to its last good release."""
    health_timeout_s: float = Field(180.0, gt=0)
    """A release that does not answer on its device by then goes back."""
    keep_releases: int = Field(2, ge=2)
    """Releases left on a device; the one that serves and the one before always stay."""
