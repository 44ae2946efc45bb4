"""The services for real: started once, looked at, killed, repaired, stopped. Tests run in order."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from service_stack import Stack

from deployment.service_files import SERVICES
from flows.services.deploy import read_automations

pytestmark = pytest.mark.timeout(900)
LATER = ("--start-in", "90 minutes")  # created, shown, never begun


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Services that `rl-pipeline up` started."""
    folder = tmp_path_factory.mktemp("services")
    (folder / "home").mkdir()
    stack = Stack(folder / "runs", folder / "home")
    done = stack.up()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Next: prefect deployment run rl-pipeline --watch" in done.stdout
    yield stack
    stack.down()
    assert stack.living() == []


def parameters_of(stack, name):
    """Parameters of the flow run with this name."""
    (found,) = [run for run in stack.flow_runs() if run["name"] == name]
    return found["parameters"]


def test_all_run_and_listen_on_this_machine_only(stack):
    shown = stack.ours("ps", "--runs", str(stack.runs))
    assert shown.returncode == 0 and shown.stdout.count("running") == len(SERVICES)
    listening = {
        c.laddr.ip
        for process in stack.living()
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    assert not (stack.home / ".prefect").exists()


@pytest.mark.parametrize("name", ["rl-pipeline", "rl-pipeline/rl-pipeline"])
def test_bare_name_and_slash_form_reach_the_deployment_without_an_export(stack, name):
    run_name = name.replace("/", "-and-")
    given = ("-p", "profile=micro", "-p", 'overrides={"rl.steps": 3}', "-p", 'force=["rl"]')
    done = stack.prefect("deployment", "run", name, "--flow-run-name", run_name, *LATER, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Creating flow run for deployment 'rl-pipeline/rl-pipeline'" in done.stdout
    assert "Already running asyncio" not in done.stderr
    shown = parameters_of(stack, run_name)
    assert shown["profile"] == "micro" and shown["overrides"] == {"rl.steps": 3}
    assert shown["force"] == ["rl"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("steps=3", "'steps'"),
        ("profile=micr", "'micr' is not valid"),
        ("stop_after=rll", "'rll' is not one of"),
    ],
)
def test_a_name_there_is_not_is_refused_before_a_run_exists(stack, given, said):
    before = len(stack.flow_runs())
    done = stack.prefect("deployment", "run", "rl-pipeline", *LATER, "-p", given)
    assert done.returncode == 1
    assert said in " ".join((done.stdout + done.stderr).split())
    assert len(stack.flow_runs()) == before


def test_mlflow_is_small_checks_its_host_and_hands_artefacts_out_itself(stack, tmp_path):
    from mlflow import MlflowClient

    reaper = psutil.Process(stack.state("mlflow")["pid"])
    tree = [reaper, *reaper.children(recursive=True)]
    assert len(tree) <= 3
    assert sum(p.memory_full_info().pss for p in tree) < 600e6
    url = f"http://127.0.0.1:{stack.mlflow_port}"
    asked = f"{url}/api/2.0/mlflow/experiments/get?experiment_id=0"
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        request = urllib.request.Request(asked, headers={"Host": "evil.example"})
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 403
    client = MlflowClient(tracking_uri=url)
    run = client.create_run(client.create_experiment("e"))
    assert run.info.artifact_uri.startswith("mlflow-artifacts:/")
    (tmp_path / "a.bin").write_bytes(b"\x00artefact")
    client.log_artifact(run.info.run_id, str(tmp_path / "a.bin"), "deep")
    (kept,) = (stack.runs / "mlartifacts").rglob("a.bin")
    assert kept.read_bytes() == b"\x00artefact"
    back = client.download_artifacts(run.info.run_id, "deep/a.bin", str(tmp_path))
    assert Path(back).read_bytes() == b"\x00artefact"
    assert oct(os.stat(stack.runs / "mlflow.db").st_mode & 0o002) == "0o0"


def post(stack, path, body, method="POST"):
    """Say something to Prefect's API directly."""
    url = f"http://127.0.0.1:{stack.prefect_port}/api{path}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read()


def nightly(stack):
    """The nightly schedule on the server."""
    (found,) = stack.api("/deployments/name/rl-pipeline/rl-pipeline")["schedules"]
    return found


def test_up_twice_is_up_once_and_keeps_what_a_person_set(stack):
    before = stack.pids()
    schedule = nightly(stack)
    assert (schedule["slug"], schedule["active"]) == ("nightly", False)
    deployment = stack.api("/deployments/name/rl-pipeline/rl-pipeline")["id"]
    cron = {"cron": "5 4 * * *", "timezone": "Asia/Tokyo"}
    post(
        stack,
        f"/deployments/{deployment}/schedules/{schedule['id']}",
        {"active": True, "schedule": cron},
        "PATCH",
    )
    for automation in read_automations():  # as `prefect automation create` does when run again
        post(stack, "/automations/", automation.model_dump(mode="json"))
    updated = {a["id"]: a["updated"] for a in stack.api("/automations/filter", {})}
    post(stack, "/work_pools/rl-pipeline", {"concurrency_limit": 5}, "PATCH")
    done = stack.up()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("runs already") == len(SERVICES) and stack.pids() == before
    kept = nightly(stack)
    assert kept["active"] is True and kept["slug"] == "nightly"
    assert {key: kept["schedule"][key] for key in cron} == cron
    automations = stack.api("/automations/filter", {})
    names = [a["name"] for a in automations]
    assert sorted(names) == sorted({a.name for a in read_automations()})
    for each in automations:  # an update would forget the silence that is being timed
        assert updated[each["id"]] == each["updated"]
    pool = stack.api("/work_pools/rl-pipeline")
    assert (pool["type"], pool["concurrency_limit"]) == ("process", 1)


def test_after_a_crash_up_repairs(stack):
    before = stack.pids()
    killed = [psutil.Process(before[name]) for name in ("mlflow", "worker")]
    left = [p for k in killed for p in k.children(recursive=True)]
    for process in killed:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(killed, timeout=10)
    shown = stack.ours("ps", "--runs", str(stack.runs))
    assert shown.returncode == 1 and shown.stdout.count("crashed") == 2
    done = stack.up()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("had crashed") == 2
    assert [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    after = stack.pids()
    assert after["prefect"] == before["prefect"]
    assert after["worker"] != before["worker"] and after["mlflow"] != before["mlflow"]
    assert stack.ours("ps", "--runs", str(stack.runs)).returncode == 0


def test_databases_are_backed_up_while_they_are_used(stack):
    done = stack.ours("backup", "--runs", str(stack.runs))
    assert done.returncode == 0
    folder = Path(done.stdout.strip())
    assert {p.name for p in folder.iterdir()} == {"backup.json", "prefect.db", "mlflow.db"}


def test_down_leaves_nothing(stack):
    done = stack.down()
    assert done.returncode == 0 and done.stdout.count("stopped") == len(SERVICES)
    assert stack.living() == []
    assert list((stack.runs / "services").glob("*.json")) == []
    again = stack.down()
    assert again.returncode == 0 and again.stdout.count("did not run") == len(SERVICES)
