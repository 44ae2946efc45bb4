"""The RL stage over real Ray actors: on loopback only, one of them killed, and none left behind."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tasks.artifacts.progress import read_metrics
from tasks.models.load import hash_model
from tests.faults.rl_stage_order import order_of, start

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class Watch(threading.Thread):
    """Notes every descendant of a process and where it listens; kills one when told to."""

    def __init__(self, pid: int, victim: str = "", when: Callable[[], bool] = lambda: False):
        """Kill -9 the first process of the actor `victim` once `when` holds."""
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.seen: dict[int, str] = {}
        self.listening: set[tuple[str, str]] = set()
        self.actors: dict[str, list[int]] = {}
        self.over = threading.Event()
        self.victim, self.when = victim, when
        self.killed: int | None = None

    def run(self) -> None:
        while not self.over.wait(0.05):
            try:
                family = [self.root, *self.root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in family:
                try:
                    self._look(process)
                except psutil.Error:
                    continue
            if self.killed is None and self.victim in self.actors and self.when():
                self.killed = self.actors[self.victim][0]
                os.kill(self.killed, signal.SIGKILL)

    def _look(self, process: psutil.Process) -> None:
        name = " ".join(process.cmdline()[:2])[:80]
        self.seen[process.pid] = name
        for actor in ("LearnerActor", "RolloutActor", "GraderActor"):
            pids = self.actors.setdefault(actor, []) if f"ray::{actor}" in name else [process.pid]
            if process.pid not in pids:
                pids.append(process.pid)
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                self.listening.add((name, connection.laddr.ip))


def stage_process(folder, config, data, snapshot) -> subprocess.Popen:
    """The RL stage in a process of its own; it writes `rl/` and `log` into `folder`."""
    return start(order_of(config, data, snapshot, folder / "rl"), folder / "log")


def steps_told(out: Path) -> int:
    """Optimiser steps that have a line in the metrics."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


STEPS = 24


@pytest.fixture(scope="module")
def ray_run(tiny_config, tiny_data, tiny_snapshot, tmp_path_factory):
    """A run whose only rollout worker is killed with -9 after two steps, watched from outside."""
    folder = tmp_path_factory.mktemp("ray")
    config = tiny_config(rl={"steps": STEPS, "staleness_limit": 1, "runtime": {"type": "ray"}})
    process = stage_process(folder, config, tiny_data, tiny_snapshot)
    watch = Watch(process.pid, "RolloutActor", lambda: steps_told(folder / "rl") >= 2)
    watch.start()
    code = process.wait(200)
    watch.over.set()
    watch.join()
    assert code == 0, (folder / "log").read_text()[-3000:]
    return folder / "rl", watch, process.pid


def test_it_trains_and_leaves_what_the_inline_run_leaves(ray_run):
    out, _, _ = ray_run
    record = json.loads((out / "record.json").read_text())
    assert record["sha256"] == hash_model(out / "policy")
    assert record["meta"]["steps"] == STEPS and record["meta"]["max_staleness_seen"] <= 1
    assert record["meta"]["sync_proofs"] >= STEPS
    assert [m["step"] for m in read_metrics(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert set(json.loads((out / "ledger.json").read_text())["seconds"]) == {
        "learner",
        "rollout-0",
    }


def test_the_worker_that_was_killed_was_replaced_once(ray_run):
    out, watch, _ = ray_run
    first, second = watch.actors["RolloutActor"]
    assert watch.killed == first != second
    meta = json.loads((out / "record.json").read_text())["meta"]
    assert meta["worker_losses"] == 1 and meta["resumes"] == 0
    log = (out.parent / "log").read_text()
    assert log.count("rollout-0 is lost") == 1


def test_every_prompt_it_had_is_trained_on_or_waits_to_be_dispatched_again(ray_run):
    out, _, _ = ray_run
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    queue = json.loads((newest / "manifest.json").read_text())["loop"]["queue"]
    kept = [t["serial"] for t in (*queue["waiting"], *queue["open"])]
    assert len(kept) == len(set(kept))
    trained = [json.loads(x) for x in (out / "trained_rows.jsonl").read_text().splitlines()]
    groups = [row for step in trained for row in step["row_ids"]]
    assert len(groups) == STEPS * 2
    samples = json.loads((out / "ledger.json").read_text())["samples"]
    filtered = samples["filtered"] // 4  # batches without a solved problem: done with, too
    assert queue["next_serial"] == len(groups) + filtered + len(kept)


def test_the_books_balance_over_processes_and_a_loss(ray_run):
    out, _, _ = ray_run
    ledger = json.loads((out / "record.json").read_text())["meta"]["ledger"]
    assert ledger["balanced"], ledger


def test_learner_and_worker_are_processes_of_their_own(ray_run):
    _, watch, driver = ray_run
    (learner,), workers = watch.actors["LearnerActor"], watch.actors["RolloutActor"]
    assert len({driver, learner, *workers}) == 4


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


@pytest.mark.slow
def test_actors_that_do_not_come_up_in_time_are_a_named_error(
    tiny_config, tiny_data, tiny_snapshot, tmp_path
):
    config = tiny_config(rl={"runtime": {"type": "ray", "start_timeout_s": 0.05}})
    process = stage_process(tmp_path, config, tiny_data, tiny_snapshot)
    assert process.wait(100) == 1
    log = (tmp_path / "log").read_text()
    assert "EngineUnavailableError: rl.runtime.start_timeout_s=0.05" in log, log[-3000:]


@pytest.mark.slow
def test_two_ranks_and_a_grader_and_a_rank_that_dies(
    tiny_config, tiny_data, tiny_snapshot, tmp_path
):
    """Killed after three steps, the run says so and goes on from what both ranks had kept."""
    runtime = {"type": "ray", "learner_ranks": 2, "grader_workers": 1}
    rl = {"steps": 6, "staleness_limit": 1, "runtime": runtime, "deepspeed": {"zero_stage": 2}}
    config = tiny_config(rl=rl)
    process = stage_process(tmp_path, config, tiny_data, tiny_snapshot)
    watch = Watch(process.pid, "LearnerActor", lambda: steps_told(tmp_path / "rl") >= 3)
    watch.start()
    assert process.wait(200) == 1
    watch.join()
    log = (tmp_path / "log").read_text()
    assert "LearnerLostError: a learner process is gone" in log, log[-3000:]
    assert [len(watch.actors[a]) for a in ("LearnerActor", "RolloutActor", "GraderActor")] == [
        2, 1, 1,
    ]  # fmt: skip
    kept = sorted((tmp_path / "rl" / "checkpoints").glob("step-*"))[-1]
    files = {p.name for p in kept.iterdir()}
    assert {"optimiser-0-of-2.safetensors", "optimiser-1-of-2.safetensors"} <= files

    process = stage_process(tmp_path, config, tiny_data, tiny_snapshot)
    assert process.wait(200) == 0, (tmp_path / "log").read_text()[-3000:]
    meta = json.loads((tmp_path / "rl" / "record.json").read_text())["meta"]
    assert meta["steps"] == 6 and meta["resumes"] == 1 and meta["ledger"]["balanced"]
    steps = [m["step"] for m in read_metrics(tmp_path / "rl" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]
