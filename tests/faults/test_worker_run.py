"""A fresh clone, `make up`, and a run started by its bare name: what a person gets on day one."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from service_stack import CHECKOUT, Stack

from tasks.stages import STAGES
from tasks.tracking.stage_log import is_artifact
from tests.figures.record import record

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]
LIMIT_BYTES = 64e6


@pytest.fixture
def clone(tmp_path):
    """A fresh clone beside this checkout, with the environment that is installed already."""
    root, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    command = ["git", "clone", "--quiet", "--no-hardlinks", str(CHECKOUT), str(root)]
    subprocess.run(command, check=True)
    (root / ".venv").symlink_to(CHECKOUT / ".venv")
    for name in ("requirements.lock", "pyproject.toml"):
        os.utime(
            root / name, (0, 0)
        )  # older than .venv/.installed: `make install` has nothing to do
    stack = Stack(root / "runs", home, root=root, exported=False)
    yield stack
    stack.down()
    assert stack.living() == []
    shutil.rmtree(root, ignore_errors=True)


def make(stack, target):
    """`make up` on the stack's ports."""
    ports = f"--prefect-port {stack.prefect_port} --mlflow-port {stack.mlflow_port}"
    return stack.run("make", target, *([f"ARGS={ports}"] if target == "up" else []))


def mlflow_client(stack):
    """A client of the stack's MLflow server."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"http://127.0.0.1:{stack.mlflow_port}")


def stage_runs(client, summary):
    """The nested MLflow runs of the newest run, by stage."""
    parent = client.get_run(summary["mlflow"]["run_id"])
    found = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    return parent, {run.data.tags["stage"]: run for run in found}


def sha256(path):
    """Hash of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def missing_artefacts(client, runs, stack, folder):
    """Artefacts that MLflow does not hand out byte for byte, and how many were compared."""
    wrong, compared = [], 0
    for stage, run in runs.items():
        marks = list((stack.runs / "store" / stage).glob("*/.stage/finished.json"))
        files = json.loads(marks[0].read_bytes())["files"]
        for name, facts in files.items():
            if not is_artifact(name) or facts["size"] > LIMIT_BYTES:
                continue
            compared += 1
            target = folder / stage
            target.mkdir(exist_ok=True)
            try:
                got = client.download_artifacts(run.info.run_id, name, str(target))
                if sha256(got) != facts["sha256"]:
                    wrong.append(f"{stage}/{name}")
            except OSError:
                wrong.append(f"{stage}/{name}")
    return wrong, compared


def lineage(stack, thing):
    """The graph around a thing, or an empty one where the command fails."""
    done = stack.ours("lineage", thing, "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {}


def lineage_checks(stack):
    """Whether the bundle leads to the prompts, and a prompt row to the bundle."""
    (bundle,) = (stack.runs / "store" / "package").glob("*/bundle")
    (train,) = (stack.runs / "store" / "data").glob("*/train.jsonl")
    rows = [json.loads(line)["id"] for line in train.read_text().splitlines()]
    data = json.loads((train.parent / ".stage" / "finished.json").read_bytes())
    from_bundle, from_row = lineage(stack, str(bundle)), lineage(stack, rows[0])
    asked = from_bundle.get("asked", "?")
    return {
        "lineage from the bundle reaches the prompts": data["record"]["sha256"]
        in from_bundle.get("ancestors", []),
        "lineage from a prompt row reaches the bundle": asked in from_row.get("descendants", []),
    }


@pytest.mark.needs("git", "make")
@pytest.mark.figure("worker_run_from_checkout")
def test_worker_run_from_a_fresh_clone(clone, tmp_path):
    checks = {}
    up = make(clone, "up")
    checks["make up"] = up.returncode == 0
    assert checks["make up"], up.stdout + up.stderr
    watched = clone.prefect("deployment", "run", "rl-pipeline", "-p", "profile=micro", "--watch")
    text = " ".join(watched.stdout.split())
    assert watched.returncode == 0, watched.stdout + watched.stderr
    checks["Completed, by bare name"] = "finished successfully in 'Completed'" in text
    for number, stage in enumerate(STAGES, start=1):
        place = f"stage {number}/{len(STAGES)} {stage}"
        checks[f"{stage} is seen to start and end"] = all(
            f"{place} {what}" in text for what in ("starts", "done in")
        )
    summary = json.loads((clone.runs / "latest" / "summary.json").read_bytes())
    client = mlflow_client(clone)
    parent, runs = stage_runs(client, summary)
    folder = tmp_path / "downloaded"
    folder.mkdir()
    wrong, compared = missing_artefacts(client, runs, clone, folder)
    checks["MLflow has the run and its six stages"] = parent.info.status == "FINISHED" and set(
        runs
    ) == set(STAGES)
    checks["MLflow holds all artefacts, byte for byte"] = compared > 20 and not wrong
    archives = list((folder / "package").glob("*.tar.gz"))
    checks["MLflow holds the bundle's archive"] = len(archives) == 1
    addresses = {run.info.artifact_uri.partition(":")[0] for run in (parent, *runs.values())}
    checks["no address names this machine's folders"] = addresses == {"mlflow-artifacts"}
    checks |= lineage_checks(clone)
    down = make(clone, "down")
    checks["make down leaves nothing"] = down.returncode == 0 and clone.living() == []
    failed = sorted(name for name, holds in checks.items() if not holds)
    record(
        "worker_run_from_checkout",
        value=sum(checks.values()) / len(checks),
        met=not failed,
        note=f"{compared} artefacts compared"
        + (f"; not held: {', '.join(failed)}; {wrong[:5]}" if failed else ""),
        details=checks,
    )
    assert not failed, (failed, wrong[:5])


def test_a_run_survives_a_restart_of_the_server(clone):
    """Leases in files and a limit of the pool: with either in memory the run would crash."""
    assert make(clone, "up").returncode == 0
    given = ("-p", "profile=micro", "-p", "stop_after=sft")
    assert clone.prefect("deployment", "run", "rl-pipeline", *given).returncode == 0
    clone.wait_for_stage("data")
    before = clone.state("prefect")["pid"]
    psutil.Process(before).send_signal(signal.SIGKILL)
    psutil.wait_procs([psutil.Process(before)] if psutil.pid_exists(before) else [], timeout=10)
    again = make(clone, "up")
    assert again.returncode == 0, again.stdout + again.stderr
    assert clone.state("prefect")["pid"] != before
    run = wait_terminal(clone)
    assert run["state_type"] == "COMPLETED", run["state"]
    assert len(clone.flow_runs()) == 1
    summary = json.loads((clone.runs / "latest" / "summary.json").read_bytes())
    assert summary["stages"]["sft"]["status"] == "completed"


def wait_terminal(stack, timeout_s=600.0):
    """The only flow run, when it has ended."""
    import time

    deadline_s = time.monotonic() + timeout_s
    while True:
        (run,) = stack.flow_runs()
        if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return run
        assert time.monotonic() < deadline_s, run["state"]
        time.sleep(1.0)
