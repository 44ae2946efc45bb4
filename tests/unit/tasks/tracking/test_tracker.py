"""The tracker over a real SQLite store: said, locked, unreachable, and uploaded later."""

import json
import socket
import sqlite3
import subprocess
import sys
import time

import pytest

from tasks.artifacts import ArtifactRecord
from tasks.artifacts.store import StageFolder
from tasks.tracking.operations import (
    create_run,
    end_run,
    log_dataset,
    log_file,
    log_metrics,
    log_params,
    set_tags,
)
from tasks.tracking.reachable import why_unreachable
from tasks.tracking.reconcile import close_orphans
from tasks.tracking.stage_log import StageLog, is_readable
from tasks.tracking.tracker import (
    PENDING_NAME,
    TrackingUploadError,
    open_tracker,
    owner_tags,
    read_pending,
    upload_pending,
)


def line(step, **values):
    """A metric line as a stage writes it."""
    return {"step": step, "time_s": 1000.0 + step, "values": values}


def a_run(tracker, path):
    """Everything a run says, small."""
    tracker.say(
        create_run("run", "r1", None, {"git.sha": "abc"}),
        create_run("rl", "calculator-rl", "run", {"stage": "rl"}),
        log_params("rl", {"rl.steps": "3", "odd name (1)": "x" * 9000}),
    )
    tracker.say(
        log_metrics("rl", [line(1, **{"rl/reward": 0.25}), line(2, **{"rl/reward": None})]),
        log_file("rl", path, None),
        log_dataset("rl", "data", "d" * 64, "runs/store/data/x", "training"),
        set_tags("rl", {"cached": "false"}),
        end_run("rl", "FINISHED"),
        end_run("run", "FINISHED"),
    )


@pytest.fixture
def path(tmp_path):
    """A small artefact."""
    path = tmp_path / "summary.json"
    path.write_text("{}")
    return path


def assert_whole(client, ids, tmp_path):
    """The store holds the run as it was said."""
    parent, nested = client.get_run(ids["run"]), client.get_run(ids["rl"])
    assert parent.data.tags["git.sha"] == "abc"
    assert (parent.info.status, nested.info.status) == ("FINISHED", "FINISHED")
    assert nested.data.tags["mlflow.parentRunId"] == ids["run"]
    assert nested.data.params["rl.steps"] == "3"
    history = client.get_metric_history(ids["rl"], "rl/reward")
    assert [(m.step, m.value, m.timestamp) for m in history] == [(1, 0.25, 1_001_000)]
    (dataset,) = nested.inputs.dataset_inputs
    assert dataset.dataset.digest == "d" * 36
    assert {t.key: t.value for t in dataset.tags}["sha256"] == "d" * 64
    assert [a.path for a in client.list_artifacts(ids["rl"])] == ["summary.json"]


def test_a_reachable_store_takes_everything_and_leaves_nothing_pending(runs, path, tmp_path):
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    a_run(tracker, path)
    assert (tracker.pending, tracker.problem) == (0, None)
    assert not (runs / "r1" / PENDING_NAME).exists()
    assert_whole(tracker.speaker.client, tracker.speaker.ids, tmp_path)
    assert tracker.spent_s > 0


def test_a_locked_store_keeps_all_in_order_and_takes_it_when_unlocked(runs, path, tmp_path):
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    holder = sqlite3.connect(runs / "mlflow.db")
    holder.execute("BEGIN EXCLUSIVE")
    a_run(tracker, path)
    assert tracker.pending == 9
    assert "locked" in tracker.problem
    assert tracker.run_id("run") is None
    _, kept = read_pending(runs / "r1" / PENDING_NAME)
    names = "create_run create_run params metrics file dataset tags end_run end_run"
    assert [operation["op"] for operation in kept] == names.split()
    holder.rollback()
    holder.close()
    tracker.retry()
    assert (tracker.pending, tracker.problem) == (0, None)
    assert not (runs / "r1" / PENDING_NAME).exists()
    assert_whole(tracker.speaker.client, tracker.speaker.ids, tmp_path)


def test_a_store_that_locks_half_way_is_uploaded_later_into_the_same_run(runs, path, tmp_path):
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    tracker.say(create_run("run", "r1", None, {"git.sha": "abc"}))
    started = tracker.run_id("run")
    holder = sqlite3.connect(runs / "mlflow.db")
    holder.execute("BEGIN IMMEDIATE")
    tracker.say(set_tags("run", {"late": "yes"}), end_run("run", "FINISHED"))
    with pytest.raises(TrackingUploadError, match="0 of 2 operations"):
        upload_pending(runs / "r1")
    holder.rollback()
    holder.close()
    assert upload_pending(runs / "r1") == 2
    assert upload_pending(runs / "r1") == 0
    run = tracker.speaker.client.get_run(started)
    assert (run.data.tags["late"], run.info.status) == ("yes", "FINISHED")


def test_an_unreachable_http_store_costs_seconds_and_can_be_uploaded_elsewhere(
    runs, path, tmp_path
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.monotonic()
    tracker = open_tracker(runs, runs / "r1", "exp", f"http://127.0.0.1:{port}")
    a_run(tracker, path)
    assert time.monotonic() - start < 5
    assert tracker.pending == 9
    assert str(port) in tracker.problem
    uri = f"sqlite:///{runs / 'mlflow.db'}"
    assert upload_pending(runs / "r1", uri) == 9
    other = open_tracker(runs, runs / "r1", "exp", uri)
    found = other.speaker.client.search_runs([other.speaker.experiment_id])
    assert {run.info.run_name for run in found} == {"r1", "calculator-rl"}


def test_a_server_that_accepts_and_never_answers_does_not_stop_the_run(runs, path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracker = open_tracker(runs, runs / "r1", "exp", uri)
        a_run(tracker, path)
    assert tracker.pending == 9


def test_a_pending_line_cut_off_by_a_kill_is_left_out(runs):
    file = runs / "r1" / PENDING_NAME
    head = json.dumps({"op": "store", "uri": "u", "experiment": "e", "ids": {}})
    file.write_text(f'{head}\n{{"op": "tags", "run": "run", "tags": {{}}}}\n{{"op": "ta')
    store, operations = read_pending(file)
    assert (store["uri"], len(operations)) == ("u", 1)


def test_an_artefact_deleted_before_the_upload_does_not_block_the_rest(runs, path):
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    tracker.say(create_run("run", "r1", None, {}))
    path.unlink()
    tracker.say(log_file("run", path, None), end_run("run", "FINISHED"))
    assert tracker.pending == 0
    assert tracker.speaker.client.get_run(tracker.run_id("run")).info.status == "FINISHED"


def test_a_file_that_is_no_database_is_a_problem_not_a_crash(runs, path):
    (runs / "mlflow.db").write_text("not a database, whatever the name says\n" * 40)
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    a_run(tracker, path)
    assert tracker.pending == 9


def test_reachability_of_a_store_to_be_made_and_of_a_name_that_does_not_resolve(tmp_path):
    assert why_unreachable(f"sqlite:///{tmp_path}/new.db") is None
    assert why_unreachable("http://nowhere.invalid:5000") is not None


def test_orphans_of_a_dead_process_are_killed_and_those_of_the_living_are_not(runs):
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = {**owner_tags(), "owner.pid": str(dead.pid)}
    reused_pid = {**owner_tags(), "owner.started": "1.0"}
    elsewhere = {**gone, "owner.host": "another-machine"}
    cases = {"alive": owner_tags(), "gone": gone, "reused": reused_pid, "elsewhere": elsewhere}
    tracker.say(*(create_run(name, name, None, tags) for name, tags in cases.items()))
    assert close_orphans(tracker.speaker) == 2
    client, ids = tracker.speaker.client, tracker.speaker.ids
    status = {name: client.get_run(ids[name]).info.status for name in cases}
    assert status == {
        "alive": "RUNNING",
        "gone": "KILLED",
        "reused": "KILLED",
        "elsewhere": "RUNNING",
    }
    assert close_orphans(tracker.speaker) == 0


def finished_stage(runs, stage, kind, sha256):
    """A stage output on disk."""
    folder = StageFolder(runs / "store", stage, sha256 * 16)
    (folder.path / "policy").mkdir(parents=True)
    (folder.path / "policy" / "model.safetensors").write_text("w")
    (folder.path / "summary.json").write_text("{}")
    folder.control.mkdir()
    (folder.control / "key.json").write_text("{}")
    record = ArtifactRecord(kind=kind, uri=folder.path.as_posix(), sha256=sha256)
    return folder, folder.finish(record, wall_s=1.0)


def test_lineage_links_one_model_as_output_and_input_and_a_reuse_makes_no_second(runs):
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    tracker.say(create_run("run", "r1", None, {}))
    folder, finished = finished_stage(runs, "sft", "model", "abcd")
    for _ in range(2):  # made, then reused
        sft = StageLog(tracker, "sft", "smollm2.5")
        sft.open({}, {"cached": "false"})
        sft.output(folder, finished, 1e6)
        sft.close("FINISHED")
    rl = StageLog(tracker, "rl", "smollm2.5")
    rl.open({"sft": finished.record}, {})
    rl.close("KILLED")
    client, ids = tracker.speaker.client, tracker.speaker.ids
    assert tracker.problem is None
    (model,) = client.search_logged_models([tracker.speaker.experiment_id])
    assert model.tags["sha256"] == "abcd"
    assert model.status.name == "READY"
    sft_run, rl_run = client.get_run(ids["sft"]), client.get_run(ids["rl"])
    assert [m.model_id for m in sft_run.outputs.model_outputs] == [model.model_id]
    assert [m.model_id for m in rl_run.inputs.model_inputs] == [model.model_id]
    assert rl_run.data.tags["input.sft.sha256"] == "abcd"
    assert rl_run.info.status == "KILLED"
    logged = {a.path for a in client.list_artifacts(ids["sft"])}
    assert logged == {"manifest.json", "key.json", "summary.json", "policy"}
    manifest = json.loads((folder.control / "manifest.json").read_text())
    assert set(manifest["files"]) == {"policy/model.safetensors", "summary.json"}


def files_in(client, run_id, folder=None):
    """Paths of all files MLflow holds of a run."""
    found = set()
    for entry in client.list_artifacts(run_id, folder):
        found |= files_in(client, run_id, entry.path) if entry.is_dir else {entry.path}
    return found


def a_package(runs):
    """A finished package with its archive, a file too large, and what is no artefact."""
    folder = StageFolder(runs / "store", "package", "p" * 64)
    for name, size in {
        "agent-1.tar.gz": 900,
        "F16.gguf": 1001,
        "Q8_0.gguf": 1000,
        "bundle/manifest.json": 2,
        "bundle/agent.py": 3,
        "publish/v1/model.safetensors": 4,
        "samples/batch-000000.json.gz": 5,
    }.items():
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_bytes(b"x" * size)
    folder.control.mkdir()
    (folder.control / "key.json").write_text("{}")
    record = ArtifactRecord(kind="bundle", uri=folder.path.as_posix(), sha256="p" * 64)
    return folder, record


@pytest.mark.parametrize(("maker", "whole"), [(None, True), ("gone", True), ("there", False)])
def test_artefacts_up_to_the_limit_are_kept_once_and_all_stand_in_the_manifest(runs, maker, whole):
    tracker = open_tracker(runs, runs / "r1", "exp", None)
    tracker.say(create_run("run", "r1", None, {}))
    made_by = {None: None, "gone": "0" * 32, "there": tracker.run_id("run")}[maker]
    folder, record = a_package(runs)
    log = StageLog(tracker, "package", "p")
    log.open({}, {})
    log.output(folder, folder.finish(record, wall_s=1.0, mlflow_run_id=made_by), 1000)
    client, run_id = tracker.speaker.client, tracker.run_id("package")
    always = {"manifest.json", "key.json"}
    made = {"agent-1.tar.gz", "Q8_0.gguf", "bundle/manifest.json"}
    assert files_in(client, run_id) == always | (made if whole else set())
    files = json.loads((folder.control / "manifest.json").read_text())["files"]
    assert {n: f["in_mlflow"] for n, f in files.items() if f["in_mlflow"] or n == "F16.gguf"} == (
        dict.fromkeys(made, True) if whole else {}
    ) | {"F16.gguf": False}
    assert files["F16.gguf"]["size"] == 1001 and len(files["F16.gguf"]["sha256"]) == 64


def test_without_its_server_a_run_still_keeps_files_whose_address_only_a_server_resolves(
    runs, path
):
    tracker = open_tracker(runs, runs / "r1", "proxied", None)
    tracker.speaker._artifacts = "mlflow-artifacts:/"  # as a server makes the experiment
    tracker.say(create_run("run", "r1", None, {}))
    offline = open_tracker(runs, runs / "r1", "proxied", None)
    offline.speaker.ids = tracker.speaker.ids
    offline.say(log_file("run", path, None), log_file("run", path, "deep/er"))
    assert offline.problem is None
    (kept,) = (runs / "mlartifacts").iterdir()
    found = {p.relative_to(kept).as_posix() for p in kept.rglob("*") if p.is_file()}
    assert found == {f"artifacts/{path.name}", f"artifacts/deep/er/{path.name}"}
    assert kept.name == offline.run_id("run")


@pytest.mark.parametrize(
    ("name", "size", "readable"),
    [
        ("summary.json", 10, True),
        ("data_docs/index.html", 10, True),
        ("rollouts.jsonl", 5 << 20, False),
        ("policy/config.json", 10, False),
        ("F16.gguf", 10, False),
        ("agent-1.tar.gz", 10, False),
    ],
)
def test_weights_and_large_files_are_named_by_hash_only(name, size, readable):
    assert is_readable(name, size) is readable
