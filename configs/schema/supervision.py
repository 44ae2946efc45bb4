"""Settings of the supervisor that every stage process runs under."""

from pydantic import Field

from configs.schema.base import Config


class SupervisionConfig(Config):
    """When a stage process is ended; none of it changes a result, so none of it reruns a stage."""

    deadline_s: float = Field(24 * 3600.0, gt=0)
    """A stage that runs longer is ended; the next run goes on from its checkpoint."""
    heartbeat_s: float = Field(3600.0, gt=0)
    """A stage that writes no progress, metric or log line for so long is ended."""
    grace_s: float = Field(10.0, ge=0)
    """Time a stage gets to end by itself before it is killed with everything it started."""
