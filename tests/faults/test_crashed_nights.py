"""A24: zombies. Whatever is killed, there is a last state, a free slot, and a night that goes on.

Real Prefect server, real worker, real MLflow store; the stages are the tiny ones.
"""

import os
import signal
import subprocess
import sys
import time
from itertools import count
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

from flows.nightly.log import NightLog
from flows.nightly.reconcile import reconcile, settle
from flows.run_owner import owners
from tests.flows.worker_world import World, all_gone, cli, tree_of, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]
DEADLINE_S = 60.0
"""Within this a killed run has its last state, once somebody who can say it is there."""
COUNTER = count(1)


def new_night() -> dict[str, Any]:
    """Parameters of a night that reuses nothing and comes after no other."""
    number = next(COUNTER)
    return {"nightly": True, "overrides": {"profile": f"night-{number}", "data.seed": number}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Server, deployment and worker."""
    living = World(tmp_path_factory.mktemp("world"))
    living.runs.mkdir()
    try:
        living.start("prefect")
        living.deployment_id = living.deploy()
        living.start("worker")
        yield living
    finally:
        living.stop()


@pytest.fixture
def begin(world):
    """Start a night that hangs in a stage: `begin("sft")` gives the flow run and its processes."""

    def start(stage: str) -> tuple[FlowRun, list[int]]:
        world.behave(**{stage: "hang"})
        with world.client() as client:
            run = client.create_flow_run_from_deployment(
                world.deployment_id, parameters=new_night()
            )
        pids = world.hanging(stage, 240)
        run = world.read(run.id)
        tree = tree_of(int(run.infrastructure_pid))
        assert pids["grandchild"] in tree  # it has a session of its own and is seen all the same
        return run, tree

    yield start
    world.behave()


def mlflow_statuses(world: World) -> dict[str, str]:
    """Status of every MLflow run by name; the last of a name counts."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{(world.runs / 'mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("rl-pipeline")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    return {run.info.run_name or "": run.info.status for run in found}


def newest(world: World) -> str:
    """Id of the newest run."""
    return owners(world.runs)[-1].run_id


def test_a24_a_killed_flow_is_crashed_at_once_and_the_night_resumes(world, begin):
    """SIGKILL, as the out-of-memory killer sends it: the worker says so at once, MLflow later."""
    run, tree = begin("rl")
    os.kill(int(run.infrastructure_pid), signal.SIGKILL)
    ended = world.ended(run.id, DEADLINE_S)
    assert ended.state.type.value == "CRASHED"
    assert all_gone(tree, 30)
    killed = newest(world)
    assert mlflow_statuses(world)[killed] == "RUNNING"  # nobody could say it
    world.behave()
    said = cli(world, "reconcile", "--resume")
    assert said.returncode == 0, said.stderr
    assert "starts again: attempt 2 of 3" in said.stdout
    again = world.ended(run.id, 240)
    assert again.state.type.value == "COMPLETED" and again.run_count == 2
    assert mlflow_statuses(world)[killed] == "KILLED"
    profile = run.parameters["overrides"]["profile"]
    outcomes = [line.outcome for line in NightLog(world.runs, profile).lines()]
    assert outcomes == ["started", "killed", "started", "trained"]
    assert "RUNNING" not in mlflow_statuses(world).values()


def test_a24_sigterm_leaves_mlflow_killed_and_a_last_state(world, begin):
    run, tree = begin("sft")
    os.kill(int(run.infrastructure_pid), signal.SIGTERM)
    ended = world.ended(run.id, DEADLINE_S)
    assert ended.state.type.value in ("CRASHED", "FAILED", "CANCELLED")
    assert all_gone(tree, DEADLINE_S)
    assert mlflow_statuses(world)[newest(world)] == "KILLED"


def test_cancelling_ends_the_whole_tree_whatever_sessions_it_made(world, begin):
    run, tree = begin("sft")
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "flow-run", "cancel", str(run.id)],
        env={**os.environ, "PREFECT_API_URL": world.api_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended = world.ended(run.id, DEADLINE_S)
    assert ended.state.type.value == "CANCELLED"
    assert all_gone(tree, DEADLINE_S)
    assert mlflow_statuses(world)[newest(world)] == "KILLED"


def test_a24_worker_and_flow_killed_is_crashed_by_the_reconciler_and_frees_the_slot(world, begin):
    run, tree = begin("sft")
    worker_tree = tree_of(world.processes["worker"].pid)
    for pid in worker_tree:
        if pid not in tree:
            os.kill(pid, signal.SIGKILL)
    os.kill(int(run.infrastructure_pid), signal.SIGKILL)
    world.processes.pop("worker").wait()
    assert all_gone([*tree, *worker_tree], 30)
    assert world.state(run.id) == "RUNNING"  # a zombie that holds the only slot
    world.behave()
    started_s = time.monotonic()
    with world.client() as client:
        report = reconcile(world.runs, client)
    assert time.monotonic() - started_s < DEADLINE_S
    assert [(s.flow_run_id, s.state) for s in report.settled] == [(str(run.id), "Crashed")]
    assert world.state(run.id) == "CRASHED"
    with world.client() as client:
        assert reconcile(world.runs, client).empty
        waiting = client.create_flow_run_from_deployment(
            world.deployment_id, parameters=new_night()
        )
    world.start("worker")
    assert world.ended(waiting.id, 240).state.type.value == "COMPLETED"


def test_a24_a_cancelling_run_without_its_worker_ends_cancelled(world, begin):
    run, tree = begin("sft")
    worker_tree = [p for p in tree_of(world.processes["worker"].pid) if p not in tree]
    for pid in worker_tree:
        os.kill(pid, signal.SIGKILL)
    world.processes.pop("worker").wait()
    with world.client() as client:
        client.set_flow_run_state(run.id, Cancelling())
        assert reconcile(world.runs, client).settled == []  # its process lives
        os.kill(int(run.infrastructure_pid), signal.SIGKILL)
        assert all_gone(tree, 30)
        (settled,) = reconcile(world.runs, client).settled
    assert settled.state == "Cancelled"
    world.start("worker")


def test_a24_a_run_that_completed_and_was_slow_to_exit_is_never_called_crashed(world):
    """The snapshot says Running and the process is dead; what counts is the state read after."""
    world.behave()
    with world.client() as client:
        run = client.create_flow_run_from_deployment(world.deployment_id, parameters=new_night())
        assert world.ended(run.id, 240).state.is_completed()
        owner = next(o for o in owners(world.runs) if o.flow_run_id == str(run.id))
        wait_for(lambda: not owner.lives, DEADLINE_S, "the process of a completed run exits")
        assert settle(client, run.id, owner) is None
        assert client.read_flow_run(run.id).state.is_completed()
        assert str(run.id) not in {s.flow_run_id for s in reconcile(world.runs, client).settled}


def test_a_server_restart_in_the_middle_of_a_night_does_not_crash_it(world):
    """Leases are the server's memory; the pool's limit holds none, and the run goes on."""
    (world.folder / "tiny_go").unlink(missing_ok=True)
    world.behave(quantize="wait")
    before = set(world.runs.glob("store/quantize/*/.stage/request.json"))
    with world.client() as client:
        run = client.create_flow_run_from_deployment(world.deployment_id, parameters=new_night())
    wait_for(
        lambda: set(world.runs.glob("store/quantize/*/.stage/request.json")) - before,
        240,
        "quantising waits",
    )
    assert world.state(run.id) == "RUNNING"
    world.kill("prefect")
    world.start("prefect")
    (world.folder / "tiny_go").touch()
    assert world.ended(run.id, 240).state.is_completed()
