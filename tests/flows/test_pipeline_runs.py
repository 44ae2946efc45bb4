"""The whole flow over the tiny stages: real Prefect server, real MLflow store, real processes."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from living import pid_lives

from configs.schema import PipelineConfig
from flows.plan import plan
from flows.run import UnknownStageError
from flows.run_lock import RunLockedError
from tasks.process_tree import marked
from tasks.supervise import StageFailedError
from tasks.tracking.tracker import upload_pending

STAGES = ["data", "sft", "rl", "evaluation", "quantize", "package"]


def changed(**blocks) -> PipelineConfig:
    """The default config with some blocks changed."""
    return PipelineConfig.model_validate(blocks)


def cached(summary) -> dict[str, bool]:
    """Whether each stage was reused."""
    return {name: stage["cached"] for name, stage in summary["stages"].items()}


def actions(config, **options) -> dict[str, str]:
    """HIT or RUN by stage."""
    return {line.stage: line.action for line in plan(config, **options)}


def ran(summary) -> set[str]:
    """Stages that did work."""
    return {name for name, hit in cached(summary).items() if hit is False}


def test_a_night_of_runs(tiny_pipeline, migrated):
    """First run, reuse, one key changed, corruption, force: one story, one store."""
    assert [line.why for line in plan(PipelineConfig())] == ["first run"] * 6

    first, events = tiny_pipeline()
    assert ran(first) == set(STAGES)
    assert [e.stage for e in events if e.kind == "stage_finished"] == STAGES
    assert first["rl"] == {
        "steps": 3,
        "samples": 24,
        "effective_samples": 10.0,
        "staleness_limit": 2,
        "max_staleness_seen": 1,
        "resumes": 0,
        "reward_gate": None,
    }
    # 72 slot-seconds at the configured 0.05 USD an hour, whatever the ledger was written with
    assert first["cost"]["usd"] == pytest.approx(72 / 3600 * 0.05)
    assert first["heldout"]["delta"] == {"value": 0.5, "ci95": [0.25, 0.75]}
    assert first["bundle"]["signed"] is True
    assert first["overhead"]["gx_s"] == 0.75
    spent_s = sum(first["overhead"][f"{part}_s"] for part in ("prefect", "mlflow", "gx"))
    assert first["overhead"]["share"] == pytest.approx(spent_s / first["wall_s"], abs=0.02)
    assert first["mlflow"]["pending_operations"] == 0
    assert Path("runs/latest").resolve().name == first["run_id"]
    assert Path("runs/latest/report.html").exists()

    assert actions(PipelineConfig()) == dict.fromkeys(STAGES, "HIT")
    second, events = tiny_pipeline()
    assert cached(second) == dict.fromkeys(STAGES, True)
    assert [e.stage for e in events if e.kind == "stage_reused"] == STAGES
    hashes = {n: s["output_sha256"] for n, s in first["stages"].items()}
    assert {n: s["output_sha256"] for n, s in second["stages"].items()} == hashes

    config = changed(evaluation={"gate": {"max_truncated_share": 0.5}})
    lines = {line.stage: line for line in plan(config)}
    assert (lines["rl"].action, lines["evaluation"].action) == ("HIT", "RUN")
    assert lines["evaluation"].why == "config evaluation.gate.max_truncated_share 0.2 -> 0.5"
    assert lines["package"].why.startswith("input evaluation is made anew")
    third, _ = tiny_pipeline(config)
    assert ran(third) == {"evaluation", "package"}

    weights = Path(next(iter(Path("runs/store/sft").glob("*/w.json"))))
    weights.write_text(weights.read_text().replace("[", "{", 1))
    (line,) = [line for line in plan(PipelineConfig()) if line.stage == "sft"]
    assert (line.action, line.why) == ("RUN", "artefact corrupted: w.json")
    fourth, events = tiny_pipeline()
    assert ran(fourth) == {"sft"}  # it came out the same, so all that follows is reused
    assert fourth["warnings"] == ["sft: artefact corrupted: w.json; it is made anew"]
    assert fourth["stages"]["sft"]["output_sha256"] == hashes["sft"]

    shutil.rmtree("runs/prefect/results")
    fifth, _ = tiny_pipeline(force=["quantize"], stop_after="quantize")
    assert ran(fifth) == {"quantize"}
    assert fifth["stages"]["package"]["status"] == "not run"
    assert fifth["bundle"] == {"path": None, "sha256": None, "signed": None}

    _check_lineage(first, second)


def _check_lineage(first, second):
    """The MLflow store tells the story of the first and the second run."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=first["mlflow"]["tracking_uri"])
    parent = client.get_run(first["mlflow"]["run_id"])
    assert parent.info.status == "FINISHED"
    for tag in ("config.sha256", "lock.sha256", "device", "seed", "prefect.flow_run_id"):
        assert parent.data.tags[tag]
    nested = _nested(client, first)
    assert set(nested) == set(STAGES)
    assert nested["rl"].data.params["rl.steps"] == "200"
    history = client.get_metric_history(nested["rl"].info.run_id, "rl/reward_mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "rl/unknown" not in nested["rl"].data.metrics
    made = nested["rl"].outputs.model_outputs[0].model_id
    assert made in {m.model_id for m in nested["evaluation"].inputs.model_inputs}
    assert nested["sft"].data.tags["input.data.sha256"] == first["stages"]["data"]["output_sha256"]
    again = _nested(client, second)
    assert again["rl"].data.tags["cached"] == "true"
    assert again["rl"].data.tags["made_by_run"] == nested["rl"].info.run_id
    assert again["rl"].outputs.model_outputs[0].model_id == made


def _nested(client, summary):
    filter_string = f"tags.`mlflow.parentRunId` = '{summary['mlflow']['run_id']}'"
    experiment = client.get_experiment_by_name("rl-pipeline").experiment_id
    found = client.search_runs([experiment], filter_string)
    whole = [client.get_run(run.info.run_id) for run in found]  # a search leaves inputs out
    return {run.data.tags["stage"]: run for run in whole}


def test_a_failing_stage_is_named_and_the_finished_ones_are_reused(tiny_pipeline, behave, migrated):
    behave(sft="raise")
    with pytest.raises(StageFailedError, match="stage sft failed"):
        tiny_pipeline()
    summary = json.loads(Path("runs/latest/summary.json").read_bytes())
    assert summary["status"] == "FAILED"
    status = {name: stage["status"] for name, stage in summary["stages"].items()}
    assert (status["data"], status["sft"], status["rl"]) == ("completed", "failed", "not run")
    assert summary["heldout"]["rl"]["accuracy"] is None
    assert _mlflow_status(summary) == "FAILED"
    behave()
    again, _ = tiny_pipeline()
    assert ran(again) == set(STAGES) - {"data"}


def _mlflow_status(summary):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=summary["mlflow"]["tracking_uri"])
    return client.get_run(summary["mlflow"]["run_id"]).info.status


def test_a_killed_stage_is_retried_and_goes_on_from_its_checkpoint(tiny_pipeline, behave, migrated):
    behave(rl="die-once")
    summary, _ = tiny_pipeline(stop_after="rl")
    assert summary["rl"]["resumes"] == 1
    assert summary["stages"]["rl"]["status"] == "completed"


def test_a_locked_store_does_not_stop_the_run_and_takes_it_later(tiny_pipeline, migrated):
    with sqlite3.connect("runs/mlflow.db") as holder:
        holder.execute("BEGIN EXCLUSIVE")
        summary, events = tiny_pipeline(stop_after="sft")
        holder.rollback()
    assert summary["stages"]["sft"]["status"] == "completed"
    assert summary["mlflow"]["run_id"] is None
    assert "locked" in summary["mlflow"]["problem"]
    assert summary["mlflow"]["pending_operations"] > 5
    assert any("rl-pipeline upload" in e.message for e in events if e.kind == "warning")
    assert any("rl-pipeline upload" in warning for warning in summary["warnings"])
    assert upload_pending(Path("runs/latest")) == summary["mlflow"]["pending_operations"]
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=summary["mlflow"]["tracking_uri"])
    runs = client.search_runs([client.get_experiment_by_name("rl-pipeline").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(runs) == 3


def test_an_unreachable_http_store_does_not_stop_the_run(tiny_pipeline, server):
    config = changed(tracking={"uri": "http://127.0.0.1:9"})
    summary, _ = tiny_pipeline(config, stop_after="sft")
    assert summary["stages"]["sft"]["status"] == "completed"
    assert summary["mlflow"]["pending_operations"] > 5


def test_unknown_stage_names_are_refused_by_name(tiny_pipeline, server):
    with pytest.raises(UnknownStageError, match="no stage rll; there are data, sft, rl"):
        tiny_pipeline(force=["rll"])


RUNNER = """
import sys, json
sys.path.insert(0, sys.argv[1])
import tiny_stages
from tasks import stages
stages.STAGES.update(tiny_stages.specs())
from configs.schema import PipelineConfig
from flows.launch import run_pipeline
run_pipeline(PipelineConfig())
"""


@pytest.fixture
def hanging_run(tmp_path, tiny_pipeline, behave):
    """A run in a process of its own, with its own Prefect server, that hangs in a stage."""
    from tasks.artifacts.provenance import module_environment

    started = []

    def start(stage: str):
        behave(**{stage: "hang"})
        environment = {**module_environment(), "HOME": str(tmp_path / "home")}
        environment.pop("PREFECT_API_URL", None)
        here = str(Path(__file__).parent)
        with Path("out.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", RUNNER, here],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        deadline = time.monotonic() + 120
        while not (found := list(Path("runs/store").glob(f"{stage}/*/hanging.json"))):
            assert process.poll() is None, Path("out.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.2)
        return process, json.loads(found[0].read_bytes())

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tree(process) -> list[int]:
    return [p.pid for p in psutil.Process(process.pid).children(recursive=True)]


def test_ctrl_c_ends_everything_frees_the_lock_and_says_what_next(
    hanging_run, migrated_only, tmp_path
):
    process, hanging = hanging_run("sft")
    tree = [process.pid, *_tree(process)]
    assert hanging["grandchild"] in tree
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=60) != 0
    assert [pid for pid in tree if pid_lives(pid)] == []
    assert "again reuses finished stages" in Path("out.txt").read_text()
    assert Path("runs/run.lock").read_text() == ""
    summary = json.loads(Path("runs/latest/summary.json").read_bytes())
    assert summary["status"] == "KILLED"
    assert summary["stages"]["data"]["status"] == "completed"
    assert summary["stages"]["sft"]["status"] == "cancelled"
    assert _mlflow_status(summary) == "KILLED"
    assert not (tmp_path / "home" / ".prefect").exists()


def test_kill_9_leaves_nothing_running_and_the_next_run_goes_on(
    hanging_run, tiny_pipeline, behave, migrated, monkeypatch
):
    process, _ = hanging_run("rl")
    tree = _tree(process)
    with pytest.raises(RunLockedError, match=f"process {process.pid}"):
        tiny_pipeline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while [pid for pid in tree if pid_lives(pid)]:
        assert time.monotonic() < deadline, "a process outlived the killed run"
        time.sleep(0.1)
    dead_run = json.loads(Path("runs/run.lock").read_text())["run_id"]
    assert marked(dead_run) == []
    behave()
    summary, _ = tiny_pipeline(stop_after="rl")
    assert cached(summary)["data"] and cached(summary)["sft"]
    assert summary["rl"]["resumes"] == 1
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=summary["mlflow"]["tracking_uri"])
    experiment = client.get_experiment_by_name("rl-pipeline").experiment_id
    assert client.search_runs([experiment], "attributes.status = 'RUNNING'") == []
    killed = client.search_runs([experiment], "attributes.status = 'KILLED'")
    assert {run.data.tags.get("stage", "parent") for run in killed} == {"parent", "rl"}
