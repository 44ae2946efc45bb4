"""Who lives and who is dead, and what is put right for the dead; no server is needed here."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psutil
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Pending, Running

from configs.schema import PipelineConfig
from flows.nightly.log import NightLine, NightLog
from flows.nightly.reconcile import MAX_ATTEMPTS, liveness, may_resume, reconcile
from flows.run_owner import Owner, owners, sign
from tasks.artifacts import write_json
from tasks.tracking.tracker import open_tracker, owner_tags

NOW = datetime.now(UTC)


def tags(pid: int, started: float | None = None) -> dict[str, str]:
    born = psutil.Process(pid).create_time() if started is None else started
    return {
        "owner.host": os.uname().nodename,
        "owner.pid": str(pid),
        "owner.started": f"{born:.2f}",
    }


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


@pytest.fixture
def zombie():
    """A process that ended and that its parent has not asked after yet."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def run(state=None, pid=None, **more) -> FlowRun:
    made = FlowRun(id=uuid4(), flow_id=uuid4(), infrastructure_pid=pid, **more)
    made.state = state or Running(timestamp=NOW)
    return made


def owner(tags) -> Owner:
    return Owner("run-1", "f", tags)


def test_a_run_that_signed_lives_as_long_as_its_process(dead_pid, zombie):
    mine = owner(owner_tags())
    assert liveness(run(), mine, NOW) == "lives"
    assert liveness(run(), owner(tags(dead_pid, 1e9)), NOW) == "dead"
    reused = owner(tags(os.getpid(), 1e9))  # the pid is there, the process is another
    assert liveness(run(), reused, NOW) == "dead"
    assert liveness(run(), owner(tags(zombie)), NOW) == "dead"


def test_an_owner_on_another_machine_is_left_alone(dead_pid):
    away = owner({**tags(dead_pid, 1e9), "owner.host": "another"})
    assert liveness(run(), away, NOW) == "lives"


def test_a_second_attempt_is_not_taken_for_the_dead_first_one(dead_pid):
    """The first attempt signed and died; the worker has started the second, which has not yet."""
    first = owner(tags(dead_pid, 1e9))
    second = run(Running(timestamp=NOW), pid=str(os.getpid()))
    assert liveness(second, first, NOW) == "lives"


def test_the_workers_bare_pid_counts_only_where_the_process_is_old_enough(dead_pid, zombie):
    assert liveness(run(pid=str(os.getpid())), None, NOW) == "lives"
    assert liveness(run(pid=str(dead_pid)), None, NOW) == "dead"
    assert liveness(run(pid=str(zombie)), None, NOW) == "dead"
    born = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    long_ago = Running(timestamp=born - timedelta(minutes=2))
    assert liveness(run(long_ago, pid=str(os.getpid())), None, NOW) == "dead"
    just_before = Running(timestamp=born - timedelta(seconds=30))
    assert liveness(run(just_before, pid=str(os.getpid())), None, NOW) == "lives"


def test_a_run_about_to_start_for_ten_minutes_is_dead_and_others_unknown():
    assert liveness(run(Pending(timestamp=NOW - timedelta(minutes=9))), None, NOW) == "unknown"
    assert liveness(run(Pending(timestamp=NOW - timedelta(minutes=11))), None, NOW) == "dead"
    assert liveness(run(Running(timestamp=NOW - timedelta(days=1))), None, NOW) == "unknown"
    assert liveness(run(Cancelling(timestamp=NOW), pid="not a pid"), None, NOW) == "unknown"


def test_only_nights_of_the_last_day_are_resumed_and_not_for_ever():
    night = {"parameters": {"nightly": True}, "deployment_id": uuid4(), "expected_start_time": NOW}
    assert may_resume(run(run_count=1, **night), NOW)
    assert not may_resume(run(run_count=MAX_ATTEMPTS, **night), NOW)
    assert not may_resume(run(run_count=1, **{**night, "parameters": {}}), NOW)
    assert not may_resume(run(run_count=1, **{**night, "deployment_id": None}), NOW)
    old = {**night, "expected_start_time": NOW - timedelta(days=1, minutes=1)}
    assert not may_resume(run(run_count=1, **old), NOW)


def test_owners_are_read_back_and_broken_files_passed_over(tmp_path):
    sign(tmp_path / "b", "flow-b")
    sign(tmp_path / "a", None)
    (tmp_path / "latest").symlink_to("b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "owner.json").write_text("{")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "owner.json").write_text('{"colour": 1}')
    assert [(o.run_id, o.flow_run_id, o.lives) for o in owners(tmp_path)] == [
        ("a", None, True),
        ("b", "flow-b", True),
    ]


def test_nights_and_mlflow_runs_of_the_dead_are_closed_once(tmp_path, dead_pid):
    from tasks.tracking.operations import create_run

    config = PipelineConfig.model_validate({"profile": "calc"})
    dead = tags(dead_pid, 1e9)
    for run_id, whose in (("killed", dead), ("living", owner_tags())):
        write_json(tmp_path / run_id / "config.json", config.model_dump(mode="json"))
        body = {"run_id": run_id, "flow_run_id": None, "tags": whose}
        (tmp_path / run_id / "owner.json").write_text(json.dumps(body))
        tracker = open_tracker(tmp_path, tmp_path / run_id, config.tracking.experiment, None)
        tracker.say(create_run("run", run_id, None, whose))
        NightLog(tmp_path, "calc").append(
            NightLine("started", "2027-01-05", "UTC", True, "", run_id)
        )
    NightLog(tmp_path, "calc").append(
        NightLine("trained", "2027-01-04", "UTC", True, "", "earlier")
    )

    report = reconcile(tmp_path, None)
    assert [(n.outcome, n.run_id, n.day) for n in report.nights] == [
        ("killed", "killed", "2027-01-05")
    ]
    assert report.mlflow_closed == 1
    found = tracker.speaker.client.search_runs([tracker.speaker.experiment_id])
    assert {r.info.run_name: r.info.status for r in found} == {
        "killed": "KILLED",
        "living": "RUNNING",
    }
    assert reconcile(tmp_path, None).empty
