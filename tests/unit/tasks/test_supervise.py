"""The supervisor over real stage processes (`tests/flows/tiny_stages.py`)."""

import json
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from configs.schema import PipelineConfig
from configs.schema.supervision import SupervisionConfig
from tasks.artifacts import ArtifactRecord, hash_file
from tasks.artifacts.progress import Reporter
from tasks.artifacts.store import StageFolder
from tasks.process_tree import descendants, marked
from tasks.stage_process import StageRequest
from tasks.stages import STAGES
from tasks.supervise import (
    Callbacks,
    OutputTail,
    Progress,
    StageFailedError,
    stage_environment,
    supervise,
)

TINY = Path(__file__).parents[2] / "flows"
LIMITS = SupervisionConfig(grace_s=0.2)


def runs(pid: int) -> bool:
    """Whether a process still does something; one that ended and waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Said:
    """Keeps what the supervisor passes on."""

    def __init__(self):
        self.progress: list[Progress] = []
        self.lines: list[dict] = []
        self.callbacks = Callbacks(self.progress.append, self.lines.extend)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run one tiny stage under the supervisor: `run("sft", behaviour, limits)`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TINY))
    data = ArtifactRecord(kind="dataset", uri="d", sha256="d0")

    def supervised(stage, behaviour=None, limits=LIMITS, said=None):
        monkeypatch.setenv("TINY_STAGES_BEHAVIOUR", json.dumps({stage: behaviour or ""}))
        folder = StageFolder(Path("store"), stage, "k" * 64)
        request = StageRequest(
            stage=stage,
            entry=f"tiny_stages:{stage}",
            slice=STAGES[stage].slice,
            config=PipelineConfig().model_dump(mode="json"),
            inputs=dict.fromkeys(STAGES[stage].inputs, data),
            out_dir=str(folder.path),
            result=str(folder.control / "result.json"),
            error=str(folder.control / "error.json"),
        )
        environment = stage_environment(f"test-{os.getpid()}:{stage}", offline=True)
        said = said or Said()
        return supervise(request, folder, limits, said.callbacks, environment)

    return supervised


def test_a_stage_returns_its_record_and_its_metrics_and_progress_are_passed_on(run):
    said = Said()
    record = run("sft", said=said)
    assert record.sha256 == hash_file(record.path / "w.json")
    assert [(m["step"], m["values"]) for m in said.lines] == [
        (1, {"sft/loss": 1.0}),
        (2, {"sft/loss": 0.5}),
        (3, {"sft/loss": 1.0 / 3}),
    ]
    assert said.progress[-1] == Progress(3, 3, "training")


def test_an_error_names_stage_type_message_and_log(run):
    with pytest.raises(StageFailedError) as caught:
        run("data", "raise")
    error = caught.value
    assert (error.stage, error.kind) == ("data", "ValueError")
    assert error.message == "gold answer 'x' in row r7 is no number"
    assert not error.retryable
    assert error.log_tail.endswith("ValueError: gold answer 'x' in row r7 is no number")
    assert "Traceback" in Path(error.log_path).read_text()
    assert "finished stages are reused" in str(error)


def test_a_killed_stage_is_named_and_worth_retrying(run):
    with pytest.raises(StageFailedError, match="SIGKILL") as caught:
        run("data", "die-once")
    assert caught.value.kind == "Killed"
    assert caught.value.retryable
    assert run("data", "die-once").kind == "dataset"


def test_an_error_of_an_earlier_attempt_is_not_taken_for_this_ones(run):
    with pytest.raises(StageFailedError, match="no number"):
        run("data", "raise")
    with pytest.raises(StageFailedError, match="SIGKILL"):
        run("data", "die-once")


@pytest.mark.parametrize(
    ("limits", "kind", "key"),
    [
        (SupervisionConfig(deadline_s=3.0, grace_s=0.2), "Deadline", "supervision.deadline_s=3"),
        (SupervisionConfig(heartbeat_s=3.0, grace_s=0.2), "Silent", "supervision.heartbeat_s=3"),
    ],
)
def test_a_limit_ends_the_stage_and_its_grandchild(run, limits, kind, key):
    with pytest.raises(StageFailedError, match=key) as caught:
        run("data", "hang", limits)
    assert caught.value.kind == kind
    hanging = json.loads(Path("store/data", "k" * 16, "hanging.json").read_text())
    assert not runs(hanging["pid"])
    assert not runs(hanging["grandchild"])


def test_ctrl_c_ends_the_stage_and_its_grandchild(run):
    marker = Path("store/data", "k" * 16, "hanging.json")

    def interrupt():
        while not marker.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run("data", "hang")
    hanging = json.loads(marker.read_text())
    assert not runs(hanging["pid"])
    assert not runs(hanging["grandchild"])


def is_stage_reaper(process: psutil.Process) -> bool:
    """Not the reaper of a server other tests share, nor a zombie, which has no command line."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "tasks.reaper" in command and "tasks.stage_process" in command


def test_a_killed_reaper_leaves_nothing_behind(run):
    marker = Path("store/data", "k" * 16, "hanging.json")

    def kill_reaper():
        while not marker.exists():
            time.sleep(0.05)
        next(p for p in descendants(os.getpid()) if is_stage_reaper(p)).kill()

    threading.Thread(target=kill_reaper, daemon=True).start()
    with pytest.raises(StageFailedError, match="SIGKILL"):
        run("data", "hang")
    assert marked(f"test-{os.getpid()}") == []
    assert not runs(json.loads(marker.read_text())["grandchild"])


def test_tail_passes_each_metric_line_once_though_a_resume_rewrites_the_file(tmp_path):
    report, tail = Reporter(tmp_path), OutputTail(tmp_path)
    assert tail.metrics() == []
    report.metrics(1, {"a": 1.0})
    report.metrics(2, {"a": 2.0})
    assert [m["step"] for m in tail.metrics()] == [1, 2]
    assert tail.metrics() == []
    report.drop_metrics_after(1)
    assert tail.metrics() == []
    report.metrics(2, {"a": 2.5})
    assert [m["values"]["a"] for m in tail.metrics()] == [2.5]


def test_tail_ignores_a_line_and_a_progress_file_cut_off(tmp_path):
    tail = OutputTail(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0, "values": {}}\n{"step": 2')
    (tmp_path / "progress.json").write_text('{"done": 1')
    assert [m["step"] for m in tail.metrics()] == [1]
    assert tail.progress() is None


def test_environment_is_quiet_offline_and_marked():
    environment = stage_environment("token", offline=True)
    assert environment["DO_NOT_TRACK"] == "true"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["RL_PIPELINE_TOKEN"] == "token"
    assert "HF_DATASETS_OFFLINE" not in stage_environment("t", offline=False)


def test_the_error_survives_pickling():
    import pickle

    error = StageFailedError("rl", "Killed", "gone", "run again", "log", "tail")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.stage, again.retryable) == (str(error), "rl", True)
