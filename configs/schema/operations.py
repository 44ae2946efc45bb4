"""Settings of daily use: nightly retrains, promotion, alerts, house-keeping."""

from typing import Literal

from pydantic import Field, field_validator

from configs.schema.base import Config
from configs.time_zones import time_zone


class NightlyConfig(Config):
    """When a night starts, from what, where new prompts come from, when it gives up."""

    cron: str = "30 2 * * *"
    """When `rl-pipeline nightly enable` has it start: minute, hour, day, month, weekday."""
    timezone: str = "UTC"
    """The zone whose clock and calendar the schedule means, as in Europe/Berlin."""
    start_from: Literal["base", "snapshot", "champion"] = "base"
    """`base` trains SFT anew on all rows; `snapshot` keeps the champion's SFT snapshot and does RL
    from it; `champion` goes on from the champion. The KL reference is what RL starts from."""
    drop_folder: str | None = None
    """Folder of new JSONL files; a night takes the rows it has not seen, through the data gate."""
    min_new_rows: int = Field(1, ge=1)
    """With fewer new rows than this since the last night, it does not train, and says so."""
    max_start_delay_s: float = Field(6 * 3600.0, gt=0)
    """A scheduled run that starts later than this skips itself."""

    @field_validator("timezone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        time_zone(name)
        return name


class PromotionConfig(Config):
    """When a candidate becomes the champion."""

    margin: float = Field(0.0, ge=0, le=1)
    """The candidate's shipped file may be this much under the champion's on held-out problems: the
    lower end of the paired 95 % interval of accuracy, candidate minus champion, is at least
    −margin."""
    problems: int = Field(2000, ge=1)
    """Held-out problems both are scored on."""
    approval: bool = False
    """True waits for a person: `rl-pipeline approve`."""
    approval_timeout_s: float = Field(24 * 3600.0, gt=0)
    """After this an unanswered release stays a candidate."""
    deploy: bool = False
    """True starts the deployment flow after a promotion."""


class AlertsConfig(Config):
    """Who is told what; addresses hold secrets and come from the environment."""

    urls_env: tuple[str, ...] = ("RL_PIPELINE_ALERT_URLS",)
    """Environment variables holding Apprise addresses, separated by spaces."""
    events: tuple[
        Literal[
            "failure", "crash", "breaker", "gate", "promotion", "cost", "nightly_missing", "skipped"
        ],
        ...,
    ] = (
        "failure",
        "crash",
        "breaker",
        "gate",
        "promotion",
        "cost",
        "nightly_missing",
        "skipped",
    )
    """`skipped` is a night that is lost: too late, or another run was in the way."""
    max_run_usd: float | None = Field(None, gt=0)
    """A run that cost more raises a `cost` alert."""
    repeat_after_s: float = Field(6 * 3600.0, ge=0)
    """The same alert is not sent again before this."""
    timeout_s: float = Field(15.0, gt=0)
    """A receiver that has not answered by then is given up, and named."""


class RetentionConfig(Config):
    """What `rl-pipeline gc` keeps beside champion, previous and what devices run."""

    keep_runs: int = Field(5, ge=1)
    """The newest runs, with all they were made from."""
    keep_backups: int = Field(7, ge=1)
