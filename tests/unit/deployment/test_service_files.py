"""What is written down about running services, and who may be told."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from deployment.service_files import (
    ServiceState,
    read_state,
    running,
    runs_folder,
    services_environment,
    state_path,
)
from tasks.artifacts import write_json


def write(runs, name, **facts):
    """A state file as `up` leaves it."""
    me = psutil.Process(os.getpid())
    body = {"name": name, "url": f"http://127.0.0.1/{name}", "pid": me.pid}
    write_json(state_path(runs, name), {**body, "started": me.create_time(), **facts})


def test_clients_hear_of_services_that_run_and_of_no_others(tmp_path):
    assert services_environment(tmp_path) == {}
    write(tmp_path, "prefect", url="http://127.0.0.1:1/api")
    write(tmp_path, "mlflow", url="http://127.0.0.1:2", started=psutil.boot_time() - 9.0)
    assert services_environment(tmp_path) == {"PREFECT_API_URL": "http://127.0.0.1:1/api"}
    write(tmp_path, "mlflow", url="http://127.0.0.1:2")
    assert services_environment(tmp_path)["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:2"


def test_a_pid_used_again_by_another_process_is_not_the_service(tmp_path):
    write(tmp_path, "worker", started=psutil.Process().create_time() - 5.0)
    assert read_state(tmp_path, "worker") is not None
    assert running(tmp_path, "worker") is None


def test_a_zombie_and_a_gone_process_do_not_run():
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(child.pid).create_time()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    state = ServiceState("worker", "", child.pid, started)
    assert not state.alive
    child.wait()
    assert not state.alive


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}', '{"pid": "many"}', "\xff"])
def test_a_damaged_state_file_is_no_service(tmp_path, text):
    state_path(tmp_path, "prefect").parent.mkdir(parents=True)
    state_path(tmp_path, "prefect").write_text(text, encoding="latin-1")
    assert read_state(tmp_path, "prefect") is None
    assert services_environment(tmp_path) == {}


@pytest.mark.parametrize(
    ("environment", "folder"),
    [({}, "runs"), ({"RL_PIPELINE_RUNS": ""}, "runs"), ({"RL_PIPELINE_RUNS": "/x/y"}, "/x/y")],
)
def test_the_runs_folder_comes_from_the_environment(environment, folder):
    assert str(runs_folder(environment)) == folder


def test_state_is_plain_json(tmp_path):
    write(tmp_path, "prefect")
    assert set(json.loads(state_path(tmp_path, "prefect").read_text())) == {
        "name",
        "url",
        "pid",
        "started",
    }
