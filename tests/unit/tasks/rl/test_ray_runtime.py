"""The RL stage over real Ray actors: other processes, on loopback only, and none left behind."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tasks.artifacts.progress import read_metrics
from tasks.models.load import hash_model

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).with_name("run_rl_stage.py")
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class Watch(threading.Thread):
    """Notes every descendant of a process, its threads of work and where it listens."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.seen: dict[int, str] = {}
        self.listening: set[tuple[str, str]] = set()
        self.actors: dict[str, set[int]] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.1):
            try:
                family = [self.root, *self.root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in family:
                try:
                    self._look(process)
                except psutil.Error:
                    continue

    def _look(self, process: psutil.Process) -> None:
        name = " ".join(process.cmdline()[:2])[:80]
        self.seen[process.pid] = name
        for actor in ("Learner", "RolloutWorker"):
            if f"ray::{actor}" in name:
                self.actors.setdefault(actor, set()).add(process.pid)
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                self.listening.add((name, connection.laddr.ip))


def stage_process(folder, config, data, snapshot) -> subprocess.Popen:
    """The RL stage in a process of its own; it writes `rl/` and `log` into `folder`."""
    inputs = {"data": data.record, "sft": snapshot.record}
    order = folder / "order.json"
    order.write_text(
        json.dumps(
            {
                "config": config.model_dump(mode="json"),
                "inputs": {k: r.model_dump(mode="json") for k, r in inputs.items()},
                "out": (folder / "rl").as_posix(),
            }
        )
    )
    environment = os.environ | {"PYTHONPATH": ROOT.as_posix(), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, SCRIPT, order], env=environment, stdout=log, stderr=log
        )


@pytest.fixture(scope="module")
def ray_run(tiny_config, tiny_data, tiny_snapshot, tmp_path_factory):
    """Three steps on one worker, watched from outside."""
    folder = tmp_path_factory.mktemp("ray")
    config = tiny_config(rl={"steps": 3, "staleness_limit": 1, "runtime": {"type": "ray"}})
    process = stage_process(folder, config, tiny_data, tiny_snapshot)
    watch = Watch(process.pid)
    watch.start()
    code = process.wait(150)
    watch.over.set()
    watch.join()
    assert code == 0, (folder / "log").read_text()[-3000:]
    return folder / "rl", watch, process.pid


def test_it_trains_and_leaves_what_the_inline_run_leaves(ray_run):
    out, _, _ = ray_run
    record = json.loads((out / "record.json").read_text())
    assert record["sha256"] == hash_model(out / "policy")
    assert record["meta"]["steps"] == 3 and record["meta"]["max_staleness_seen"] <= 1
    assert record["meta"]["sync_proofs"] >= 3
    assert [m["step"] for m in read_metrics(out / "metrics.jsonl")] == [1, 2, 3]
    assert set(json.loads((out / "ledger.json").read_text())["seconds"]) == {
        "learner",
        "rollout-0",
    }


def test_the_books_balance_over_processes(ray_run):
    out, _, _ = ray_run
    ledger = json.loads((out / "record.json").read_text())["meta"]["ledger"]
    assert ledger["balanced"], ledger


def test_learner_and_worker_are_processes_of_their_own(ray_run):
    _, watch, driver = ray_run
    learner, worker = watch.actors["Learner"], watch.actors["RolloutWorker"]
    assert len(learner) == len(worker) == 1 and not learner & worker
    assert driver not in learner | worker


def test_nothing_listens_beyond_loopback(ray_run):
    _, watch, _ = ray_run
    assert any("raylet" in name or "gcs" in name for name, _ in watch.listening)
    beyond = sorted(x for x in watch.listening if x[1] not in LOOPBACK)
    assert not beyond


def test_no_process_is_left(ray_run):
    _, watch, _ = ray_run
    assert len(watch.seen) > 4
    deadline = time.monotonic() + 15
    while left := [p for p in watch.seen if lives(p, watch.seen[p])]:
        if time.monotonic() > deadline:
            pytest.fail(f"still running: {[watch.seen[p] for p in left]}")
        time.sleep(0.2)


def lives(pid: int, name: str) -> bool:
    """Whether the process seen under this id still runs; ids are reused, so the name counts."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and (
            " ".join(process.cmdline()[:2])[:80] == name
        )
    except psutil.Error:
        return False


def test_actors_that_do_not_come_up_in_time_are_a_named_error(
    tiny_config, tiny_data, tiny_snapshot, tmp_path
):
    config = tiny_config(rl={"runtime": {"type": "ray", "start_timeout_s": 0.05}})
    process = stage_process(tmp_path, config, tiny_data, tiny_snapshot)
    assert process.wait(100) == 1
    log = (tmp_path / "log").read_text()
    assert "EngineUnavailableError: rl.runtime.start_timeout_s=0.05" in log, log[-3000:]
