"""Asynchronous RL over Ray, killed with -9: no ticket is trained on twice, and none is lost."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tasks.artifacts.progress import read_metrics
from tasks.process_tree import TOKEN_VARIABLE, descendants, end_marked
from tests.faults.rl_stage_order import Point, order_of, start
from tests.figures.record import record
from tests.tiny_run import tiny_config, tiny_data, tiny_snapshot

__all__ = ["tiny_config", "tiny_data", "tiny_snapshot"]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3000)]
STEPS, GROUPS = 8, 2
DEADLINE_S = 240


@dataclass(frozen=True)
class Kill:
    """A point in the driver, or an actor that is killed from outside after two steps."""

    point: Point | None = None
    actor: str | None = None
    everything: bool = False


def at(target: str, when: str, count: int) -> Kill:
    return Kill(Point(target, when, count))


KILLS = {
    "driver: prompts dispatched": at("tasks.rl.producer:Producer._dispatch", "after", 4),
    "driver: before a push": at("tasks.rl.buffer:RolloutBuffer.put", "before", 7),
    "driver: after a push": at("tasks.rl.buffer:RolloutBuffer.put", "after", 7),
    "driver: batch taken, not trained": at(
        "tasks.rl.consumer:Consumer._worth_training", "before", 3
    ),
    "driver: step taken, no checkpoint": at("tasks.rl.checkpoint:Checkpoints.write", "before", 3),
    "driver: checkpoint without manifest": at("tasks.rl.checkpoint:write_json", "before", 4),
    "rollout actor, from outside": Kill(actor="RolloutActor"),
    "learner actor, from outside": Kill(actor="LearnerActor"),
    "driver and all actors, from outside": Kill(everything=True),
}


class Attempt:
    """One process that runs the stage, and all that it starts."""

    def __init__(self, asked, out: Path, kill: Kill, log: Path) -> None:
        """`asked`: config, data and snapshot."""
        self.out, self.log, self.kill = out, log, kill
        self.token = f"kills-{os.getpid()}-{time.monotonic_ns()}"
        self.process = start(order_of(*asked, out, kill.point), log, **{TOKEN_VARIABLE: self.token})

    def finish(self) -> int:
        """Wait for its end, killing on the way what is to be killed; nothing of it is left."""
        try:
            if self.kill.actor or self.kill.everything:
                self._wait(lambda: self._steps() >= 2)
                self._kill_now()
            return self.process.wait(DEADLINE_S)
        finally:
            end_marked(self.token)

    def _steps(self) -> int:
        told = self.out / "metrics.jsonl"
        return len(read_metrics(told)) if told.exists() else 0

    def _kill_now(self) -> None:
        victims = [p for p in descendants(self.process.pid) if self._is_victim(p)]
        assert victims or self.process.poll() is None, self.said()
        for victim in (
            [psutil.Process(self.process.pid), *victims] if self.kill.everything else victims
        ):
            victim.send_signal(signal.SIGKILL)

    def _is_victim(self, process: psutil.Process) -> bool:
        if self.kill.everything:
            return True
        return f"ray::{self.kill.actor}" in " ".join(process.cmdline())

    def _wait(self, met: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not met():
            assert self.process.poll() is None and time.monotonic() < until, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text()[-3000:]


def books(out: Path) -> dict[str, object]:
    """The tickets of a finished run: trained on, open or waiting, and closed without training."""
    trained = [json.loads(x) for x in (out / "trained_rows.jsonl").read_text().splitlines()]
    tickets = [serial for batch in trained for serial in batch["tickets"]]
    manifest = json.loads(max((out / "checkpoints").glob("step-*/manifest.json")).read_text())
    queue = manifest["loop"]["queue"]
    unfinished = {t["serial"] for t in (*queue["open"], *queue["waiting"])}
    samples = manifest["loop"]["ledger"]["samples"]
    missing = set(range(queue["next_serial"])) - set(tickets) - unfinished
    summary = json.loads((out / "summary.json").read_text())
    return {
        "steps": [b["step"] for b in trained] == list(range(1, STEPS + 1)),
        "none twice": len(tickets) == len(set(tickets)) == STEPS * GROUPS,
        "none both trained and waiting": not unfinished & set(tickets),
        "none lost": len(missing) * 4 == samples.get("filtered", 0),
        "age within the limit": 0 <= summary["max_staleness_seen"] <= 2,
    }


@pytest.mark.figure("rl_kills_async")
def test_killed_anywhere_no_ticket_is_lost_or_trained_twice(
    tiny_config, tiny_data, tiny_snapshot, tmp_path
):
    config = tiny_config(
        rl={
            "steps": STEPS,
            "staleness_limit": 2,
            "runtime": {"type": "ray", "rollout_threads": 1, "learner_threads": 1},
        }
    )
    asked = (config, tiny_data, tiny_snapshot)
    good, wrong = {}, {}
    for number, (name, kill) in enumerate(KILLS.items()):
        out, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        first = Attempt(asked, out, kill, log).finish()
        survives = kill.actor == "RolloutActor"
        if (first == 0) != survives:
            wrong[name] = f"exit status {first}: {log.read_text()[-800:]}"
            continue
        if first and Attempt(asked, out, Kill(), log).finish():
            wrong[name] = f"did not resume: {log.read_text()[-800:]}"
            continue
        kept = books(out)
        if all(kept.values()):
            good[name] = first
        else:
            wrong[name] = f"{[k for k, v in kept.items() if not v]}"
        print(f"{name}: exit status {first}, {wrong.get(name, 'books in order')}")
    record(
        "rl_kills_async",
        value=len(good) / len(KILLS),
        met=not wrong,
        seeds=[0],
        note=f"{len(KILLS)} kills over Ray, η = 2, {STEPS} steps",
        details={"good": good, "wrong": wrong},
    )
    assert not wrong
