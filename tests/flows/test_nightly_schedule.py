"""The schedule of nights on a real Prefect server, and that its scheduler really plans them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.nightly import schedule as nightly_schedule
from flows.nightly.run import scheduled_night
from flows.nightly.schedule import (
    NotDeployedError,
    disable,
    enable,
    prefect_server,
    read_schedule,
    run_now,
)


@pytest.fixture
def client(shared_server, monkeypatch):
    """A client, and a deployment of this test's own."""
    monkeypatch.setenv("PREFECT_API_URL", shared_server)
    name = f"rl-pipeline-{uuid4().hex[:8]}"
    monkeypatch.setattr(nightly_schedule, "DEPLOYMENT", f"{name}/{name}")
    with temporary_settings({PREFECT_API_URL: shared_server}), get_client(sync_client=True) as c:
        with pytest.raises(NotDeployedError, match="`rl-pipeline up` puts it there"):
            read_schedule(c)
        c.create_deployment(c.create_flow_from_name(name), name)
        yield c


def planned(client, first: datetime, days: int) -> list:
    """Have the server plan, as its scheduler does; what is planned then."""
    deployment_id = nightly_schedule.deployment(client).id
    window = {"start_time": first.isoformat(), "end_time": (first + timedelta(days)).isoformat()}
    body = {**window, "min_time": 0.0, "min_runs": 50, "max_runs": 50}
    path = "/deployments/{id}/schedule"
    client.request("POST", path, path_params={"id": deployment_id}, json=body)
    runs = [r for r in client.read_flow_runs() if r.deployment_id == deployment_id]
    return sorted(runs, key=lambda run: run.expected_start_time)


def test_a_schedule_is_switched_on_changed_and_off(client):
    assert read_schedule(client) is None
    assert disable(client) is False
    enable(client, "30 2 * * *", "Europe/Berlin", {"profile": "micro"})
    shown = read_schedule(client)
    assert (shown.cron, shown.timezone, shown.active) == ("30 2 * * *", "Europe/Berlin", True)
    assert shown.parameters == {"profile": "micro", "nightly": True}
    enable(client, "0 4 * * *", "UTC", {"profile": "calculator", "overrides": {"rl.steps": 3}})
    assert len(nightly_schedule.deployment(client).schedules) == 1  # changed, not added
    assert read_schedule(client).cron == "0 4 * * *"
    assert disable(client) is True
    assert read_schedule(client).active is False
    assert disable(client) is False


def test_the_server_plans_one_night_a_day_over_the_change_of_clocks(client):
    """Under SQLAlchemy 2.1 it planned none at all, and said so only in its log."""
    enable(client, "30 2 * * *", "Europe/Berlin", {"profile": "micro"})
    first = datetime(2026, 10, 24, tzinfo=UTC)
    runs = planned(client, first, 3)
    assert [f"{r.expected_start_time:%d %H:%M}" for r in runs] == [
        "24 00:30",
        "25 00:30",
        "26 01:30",
    ]
    assert len(planned(client, first, 3)) == 3  # asked again, nothing is planned twice
    assert {r.auto_scheduled for r in runs} == {True}
    nights = [scheduled_night(client, r, "UTC") for r in runs]
    assert [n.day for n in nights] == ["2026-10-24", "2026-10-25", "2026-10-26"]
    assert {n.zone for n in nights} == {"Europe/Berlin"}
    assert nights[0].newer_at == runs[2].expected_start_time
    assert nights[2].newer_at is None
    assert all(n.scheduled and n.attempt == 1 for n in nights)


def test_the_night_of_another_schedule_is_no_newer_night(client):
    """Two profiles, an hour apart on one deployment: neither does the work of the other."""
    enable(client, "30 2 * * *", "UTC", {"profile": "micro"})
    other = CronSchedule(cron="30 3 * * *", timezone="UTC")
    made = [DeploymentScheduleCreate(schedule=other, active=True)]
    client.create_deployment_schedules(nightly_schedule.deployment(client).id, made)
    first, second = planned(client, datetime(2026, 10, 24, tzinfo=UTC), 1)
    assert scheduled_night(client, first, "UTC").newer_at is None
    assert scheduled_night(client, second, "UTC").day == "2026-10-24"


def test_a_schedule_deployed_anew_is_still_known_by_its_name(client):
    """Deploying gives a schedule another id; a run that waits must not lose its day for it."""
    enable(client, "30 2 * * *", "Europe/Berlin", {})
    (run,) = planned(client, datetime(2026, 10, 25, tzinfo=UTC), 1)
    found = nightly_schedule.deployment(client)
    client.delete_deployment_schedule(found.id, found.schedules[0].id)
    enable(client, "30 2 * * *", "Europe/Berlin", {})
    assert scheduled_night(client, run, "UTC").day == "2026-10-25"


def test_a_night_by_hand_is_a_night_and_not_of_the_schedule(client):
    run = run_now(client, {"profile": "micro"})
    assert run.parameters == {"profile": "micro", "nightly": True}
    assert run.auto_scheduled is False


def test_the_server_of_the_environment_answers(client):
    with prefect_server(Path("runs")) as found:
        assert read_schedule(found) is None
