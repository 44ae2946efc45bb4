"""Nights under a real server, scheduler and worker: overlapping, late, and on days clocks change.

The scheduler's own code plans the nights of the two days in the past on which Berlin's clocks
changed; a second night of such a day is planted, as a scheduler that misbehaves would.
"""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings

from configs.time_zones import time_zone
from flows.nightly.log import NightLog
from tasks.artifacts.append_log import read_log
from tests.figures.record import record
from tests.flows.worker_world import TERMINAL, World, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
ZONE = "Europe/Berlin"
SPRING, AUTUMN = "2026-03-29", "2026-10-25"
EVER = 1e9
OVERLAPS = 3
KEPT = "kept"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Server, deployment and worker."""
    quiet = {"PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false"}
    living = World(tmp_path_factory.mktemp("world"), quiet)
    living.runs.mkdir()
    try:
        living.start("prefect")
        living.deployment_id = living.deploy()
        living.start("worker")
        yield living
    finally:
        living.stop()


def schedule(world: World, when, profile: str, **overrides: object) -> UUID:
    """Have nights of a profile of its own start by `when`; returns the schedule's id."""
    parameters = {
        "nightly": True,
        "overrides": {"profile": profile, "nightly.timezone": ZONE, **overrides},
    }
    made = DeploymentScheduleCreate(schedule=when, active=True, parameters=parameters)
    with world.client() as client:
        for old in client.read_deployment_schedules(world.deployment_id):
            client.delete_deployment_schedule(world.deployment_id, old.id)
        return client.create_deployment_schedules(world.deployment_id, [made])[0].id


def plan(world: World, first: datetime, last: datetime) -> list[UUID]:
    """Have the server's scheduler plan between two instants; returns the new runs, oldest first.

    The service itself is off in this world, so that nothing else is planned.
    """
    window = {"start_time": first.isoformat(), "end_time": last.isoformat(), "min_time": 0.0}
    body = {**window, "min_runs": 100, "max_runs": 100}
    with world.client() as client:
        before = {run.id for run in client.read_flow_runs()}
        path = "/deployments/{id}/schedule"
        client.request("POST", path, path_params={"id": world.deployment_id}, json=body)
        new = [run for run in client.read_flow_runs() if run.id not in before]
    return [run.id for run in sorted(new, key=lambda run: run.expected_start_time)]


def plant(world: World, like: FlowRun, moved: timedelta) -> UUID:
    """One more scheduled run of the same schedule, at another time: a scheduler gone wrong."""
    from prefect.server.models.flow_runs import create_flow_run
    from prefect.server.schemas.core import FlowRun as ServerFlowRun
    from prefect.server.schemas.states import Scheduled

    at = like.expected_start_time + moved
    body = like.model_dump(
        mode="json",
        include={
            "flow_id",
            "deployment_id",
            "parameters",
            "work_queue_id",
            "work_queue_name",
            "created_by",
            "tags",
        },
    )
    twin = ServerFlowRun(
        **body,
        auto_scheduled=True,
        expected_start_time=at,
        next_scheduled_start_time=at,
        idempotency_key=f"planted {like.id}",
        state=Scheduled(scheduled_time=at),
    )

    async def planted(session) -> UUID:
        return (await create_flow_run(session=session, flow_run=twin)).id

    return in_database(world, planted)


def in_database(world: World, work):
    """Run the server's own code on the server's database."""
    from prefect.server.database import provide_database_interface

    url = f"sqlite+aiosqlite:///{(world.runs / 'prefect' / 'prefect.db').resolve()}"

    async def session_of():
        async with provide_database_interface().session_context(begin_transaction=True) as session:
            return await work(session)

    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: url}):
        return asyncio.run(session_of())


def ends(world: World, ids: list[UUID], timeout_s: float = 900) -> list[FlowRun]:
    """The runs, oldest first, once all of them have ended."""
    wait_for(lambda: all(world.state(i) in TERMINAL for i in ids), timeout_s, "all nights end")
    return sorted((world.read(i) for i in ids), key=lambda run: run.expected_start_time)


def most_at_once(runs: list[FlowRun]) -> int:
    """How many of the runs were at work at the same time at most."""
    moments = sorted(
        [(run.start_time, 1) for run in runs] + [(run.end_time, -1) for run in runs],
        key=lambda moment: (moment[0], moment[1]),
    )
    now = most = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def ended_as(run: FlowRun, name: str, said: str = "") -> str:
    """KEPT where the run ended in the state of that name and said so; else how it ended."""
    message = run.state.message or ""
    right = run.state.name == name and said in message
    return KEPT if right else f"{run.state.name}: {message}"


def local(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=time_zone(ZONE))


@pytest.mark.figure("nights")
def test_a22_nights_run_one_at_a_time_and_one_a_day(world):
    tally: dict[str, str] = {}
    overlapping_nights(world, tally)
    late_night(world, tally)
    for day, name in ((SPRING, "spring"), (AUTUMN, "autumn")):
        day_of_changed_clocks(world, tally, day, name)
    kept = sum(seen == KEPT for seen in tally.values())
    record(
        "nights",
        value=kept / len(tally),
        met=kept == len(tally),
        note=f"{kept} of {len(tally)} checks over nine nights; real server and worker, tiny stages",
        details=tally,
    )
    assert tally == dict.fromkeys(tally, KEPT)


def overlapping_nights(world: World, tally: dict[str, str]) -> None:
    """A night lasts while three others come due: they wait, two give way, the newest starts."""
    world.behave(sft="wait")
    now = datetime.now(UTC)
    every = IntervalSchedule(interval=timedelta(seconds=5), anchor_date=now)
    schedule(world, every, "overlap", **{"nightly.max_start_delay_s": EVER})
    ids = plan(world, now, now + timedelta(seconds=1))
    wait_for(lambda: list(world.runs.glob("store/sft/*/.stage/request.json")), 240, "SFT waits")
    last = datetime.now(UTC)
    ids += plan(world, last - timedelta(seconds=5 * OVERLAPS), last)
    assert len(ids) == OVERLAPS + 1
    time.sleep(10)  # the worker asks every second, the late-run service every two
    states = [world.state(i) for i in ids]
    waiting = states.count("RUNNING") == 1 and states.count("SCHEDULED") == OVERLAPS
    tally["others wait while one runs"] = KEPT if waiting else ", ".join(states)
    (world.folder / "tiny_go").touch()
    runs = ends(world, ids)
    tally["one at a time"] = KEPT if most_at_once(runs) == 1 else f"{most_at_once(runs)} at once"
    tally["first night"] = ended_as(runs[0], "Completed")
    for number, run in enumerate(runs[1:-1], start=2):
        tally[f"night {number} of the backlog"] = ended_as(run, "Skipped", "a newer night is due")
    tally["newest night of the backlog"] = ended_as(runs[-1], "Completed")
    world.behave()


def late_night(world: World, tally: dict[str, str]) -> None:
    """A night that could not start for an hour, with half a minute allowed, skips itself."""
    due = datetime.now(UTC) - timedelta(hours=1)
    hourly = IntervalSchedule(interval=timedelta(days=1), anchor_date=due)
    schedule(world, hourly, "late", **{"nightly.max_start_delay_s": 30.0})
    ids = plan(world, due - timedelta(minutes=1), due + timedelta(minutes=1))
    (run,) = ends(world, ids)
    tally["late night"] = ended_as(run, "Skipped", "late, more than")
    alerts = [
        row for row in read_log(world.runs / "alerts.jsonl").rows if "late: night" in str(row)
    ]
    tally["late night is told"] = KEPT if alerts else "no alert"


def day_of_changed_clocks(world: World, tally: dict[str, str], day: str, name: str) -> None:
    """Half past two in Berlin on a day it is there twice, or not at all."""
    half_past_two = CronSchedule(cron="30 2 * * *", timezone=ZONE)
    schedule(world, half_past_two, name, **{"nightly.max_start_delay_s": EVER})
    first, last = local(f"{day}T00:00"), local(f"{day}T23:59")
    ids = plan(world, first, last)
    (run,) = ends(world, ids)
    again = plan(world, first, last)  # as a scheduler that starts anew does
    tally[f"{name}: planned once"] = KEPT if not again else f"{len(again)} more"
    tally[f"{name}: runs"] = ended_as(run, "Completed")
    (second,) = ends(world, [plant(world, run, timedelta(hours=1))])
    tally[f"{name}: no second night"] = ended_as(second, "Skipped", "already done")
    lines = NightLog(world.runs, name).lines()
    days = [line.day for line in lines if line.outcome == "trained"]
    tally[f"{name}: its day"] = KEPT if days == [day] else str(days)
