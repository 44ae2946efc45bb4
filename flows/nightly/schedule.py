"""The schedule of nights on the Prefect server: shown, switched on and off, one started by hand."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ValidationError

from configs.time_zones import time_zone
from deployment.service_files import services_environment

DEPLOYMENT = "rl-pipeline/rl-pipeline"
SLUG = "nightly"
SHOWN_STARTS = 3


class NoServerError(RuntimeError):
    """No Prefect server answers."""


class NotDeployedError(LookupError):
    """The server knows no deployment of the pipeline."""


class CronError(ValueError):
    """Not a cron expression."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of nights as it stands."""

    cron: str
    timezone: str
    active: bool
    parameters: dict[str, Any]


def server_url(runs_dir: Path) -> str | None:
    """The server in PREFECT_API_URL, or the one that `rl-pipeline up` started; else None."""
    return os.environ.get("PREFECT_API_URL") or services_environment(runs_dir).get(
        "PREFECT_API_URL"
    )


@contextlib.contextmanager
def prefect_server(runs_dir: Path) -> Iterator[SyncPrefectClient]:
    """A client of the server.

    Raises:
        NoServerError: there is none, or it does not answer.
    """
    url = server_url(runs_dir)
    if url is None:
        raise NoServerError(
            "no Prefect server: start one with `rl-pipeline up`, or name it in PREFECT_API_URL"
        )
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        if (problem := client.api_healthcheck()) is not None:
            raise NoServerError(
                f"the Prefect server at {url} does not answer ({problem}); `rl-pipeline ps` shows "
                "the services, `rl-pipeline up` repairs them"
            )
        try:
            yield client
        except HTTPError as error:
            raise NoServerError(f"the Prefect server at {url} broke off: {error}") from error


def deployment(client: SyncPrefectClient) -> DeploymentResponse:
    """The pipeline's deployment.

    Raises:
        NotDeployedError: there is none.
    """
    try:
        return client.read_deployment_by_name(DEPLOYMENT)
    except ObjectNotFound:
        raise NotDeployedError(
            f"the server has no deployment {DEPLOYMENT}; `rl-pipeline up` puts it there"
        ) from None


def read_schedule(client: SyncPrefectClient) -> Schedule | None:
    """The schedule of nights; None where there is none, or it is no cron.

    Raises:
        NotDeployedError: the pipeline is not deployed.
    """
    for found in deployment(client).schedules:
        if found.slug == SLUG and isinstance(found.schedule, CronSchedule):
            return Schedule(
                found.schedule.cron,
                found.schedule.timezone or "UTC",
                found.active,
                dict(found.parameters),
            )
    return None


def enable(
    client: SyncPrefectClient, cron: str, timezone: str, parameters: dict[str, Any]
) -> Schedule:
    """Have nights start by `cron` in `timezone`; replaces what was set before.

    Raises:
        CronError: not a cron expression of five fields.
        UnknownTimeZoneError: no such zone; names near ones.
        NotDeployedError: the pipeline is not deployed.
    """
    schedule = cron_schedule(cron, timezone)
    found = deployment(client)
    nightly = {**parameters, "nightly": True}
    ours = [s for s in found.schedules if s.slug == SLUG]
    for old in ours:  # the server takes back what it had planned by it
        client.update_deployment_schedule(
            found.id, old.id, active=True, schedule=schedule, parameters=nightly
        )
    if not ours:
        made = DeploymentScheduleCreate(
            schedule=schedule, active=True, slug=SLUG, parameters=nightly
        )
        client.create_deployment_schedules(found.id, [made])
    return Schedule(cron, timezone, True, nightly)


def disable(client: SyncPrefectClient) -> bool:
    """Have no nights start; returns whether they did before."""
    found = deployment(client)
    were = [s for s in found.schedules if s.slug == SLUG and s.active]
    for schedule in were:
        client.update_deployment_schedule(found.id, schedule.id, active=False)
    return bool(were)


def run_now(client: SyncPrefectClient, parameters: dict[str, Any]) -> FlowRun:
    """Start one night now, on the worker; it does not count as the night of its day."""
    return client.create_flow_run_from_deployment(
        deployment(client).id, parameters={**parameters, "nightly": True}
    )


def cron_schedule(cron: str, timezone: str) -> CronSchedule:
    """The schedule, checked.

    Raises:
        CronError: not a cron expression of five fields.
        UnknownTimeZoneError: no such zone; names near ones.
    """
    time_zone(timezone)
    fields = cron.split()
    try:
        schedule = CronSchedule(cron=cron, timezone=timezone)
    except (ValidationError, ValueError) as error:
        raise CronError(_not_cron(cron)) from error
    if len(fields) != 5:
        raise CronError(_not_cron(cron))
    return schedule


def _not_cron(cron: str) -> str:
    return (
        f"--cron {cron!r}: expected five fields, minute, hour, day, month and weekday, as in "
        "'30 2 * * *' for half past two every night"
    )


def next_starts(
    cron: str, timezone: str, after: datetime, count: int = SHOWN_STARTS
) -> list[datetime]:
    """The next times the schedule names, UTC, as Prefect's own scheduler works them out."""
    from prefect.server.schemas.schedules import CronSchedule as ServerSchedule

    schedule = ServerSchedule(cron=cron, timezone=timezone)
    # where clocks change, the first ones may lie before the time asked for
    found = asyncio.run(schedule.get_dates(n=count + 2, start=after))
    return [datetime.fromtimestamp(m.timestamp(), UTC) for m in found if m > after][:count]
