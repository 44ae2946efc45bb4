"""How tools are called while episodes are played."""

from pydantic import Field, model_validator

from configs.schema.base import Config


class LogNormalLatency(Config):
    """Seconds each tool call takes longer: log-normal, drawn anew for every call of every episode.

    For seeing what slow tools do to a loop, before the tools are there.
    """

    median_s: float = Field(0.3, gt=0)
    sigma: float = Field(1.0, ge=0)
    """Standard deviation of the logarithm; 0 makes every call take the median."""
    max_s: float = Field(10.0, gt=0)
    """Longer draws are cut to this."""

    @model_validator(mode="after")
    def _median_below_cut(self) -> "LogNormalLatency":
        if self.median_s > self.max_s:
            raise ValueError(
                f"rl.tools.simulated_latency.median_s={self.median_s} is above max_s={self.max_s}: "
                "every call would take max_s; raise max_s or lower median_s"
            )
        return self


class ToolSettings(Config):
    """Tool calls of one rollout worker: how many at once, how often, and how long each may take."""

    concurrency: int = Field(64, ge=1)
    """Calls in flight at once; the others wait for their turn."""
    timeout_s: float = Field(30.0, gt=0)
    """A call that takes longer is given up and tried again, or answered `error: …`."""
    retries: int = Field(1, ge=0)
    """Times a call is tried again after a time-out or an error of its connection."""
    rate_per_s: float | None = Field(None, gt=0)
    """Calls started a second, retries included; None sets no rate."""
    simulated_latency: LogNormalLatency | None = None
    """Makes every call slower, for trying out; None leaves tools as fast as they are."""
