"""RL killed with SIGKILL at every point where something is half done, resumed, and compared.

Deterministic mode (η = 0, inline, CPU): the resumed run trains on the same rows in the same order
and ends in the same weights as a run that was never killed.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tasks.artifacts.progress import read_metrics
from tasks.models.load import hash_model
from tests.faults.rl_stage_order import CHILD, ROOT, Point, environment, order_of
from tests.figures.record import record
from tests.tiny_run import tiny_config, tiny_data, tiny_snapshot

__all__ = ["tiny_config", "tiny_data", "tiny_snapshot"]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
STEPS = 5
TIMED = {"rollout_tokens_per_s", "train_tokens_per_s", "overlap_share"}


LOOP, BUFFER = "tasks.rl.loop:AsyncLoop", "tasks.rl.buffer:RolloutBuffer"
LEARNER, WORKER = "tasks.rl.learner:Learner", "tasks.rl.rollout_worker:RolloutWorker"
ENGINE = "tasks.sampling.transformers_engine:TransformersEngine"
POINTS = {
    "before the first publish": Point(f"{LEARNER}.publish", "before", 1),
    "publish: weights written, no marker": Point("tasks.rl.weight_sync:write_json", "before", 3),
    "published, no engine has it": Point(f"{WORKER}.sync", "before", 3),
    "weights loaded, canary not scored": Point(f"{ENGINE}.score", "before", 3),
    "canary scored, proof not judged": Point("tasks.rl.rollout_worker:prove", "before", 3),
    "during generate, between two turns": Point(f"{ENGINE}.generate", "after", 3),
    "sampled, not graded": Point(f"{WORKER}.grade", "before", 3),
    "graded, not pushed": Point(f"{BUFFER}.put", "before", 5),
    "after the first push of a batch": Point(f"{BUFFER}.put", "after", 5),
    "batch taken, not trained": Point(f"{LEARNER}.train", "before", 3),
    "gradients there, no step taken": Point(
        "tasks.models.train_engine:TrainEngine.step", "before", 3
    ),
    "step taken, not published": Point(f"{LEARNER}.train", "after", 3),
    "checkpoint: weights written, optimiser not": Point(
        "tasks.rl.learner:write_weights", "after", 5
    ),
    "checkpoint: all but the manifest": Point("tasks.rl.checkpoint:write_json", "before", 4),
    "checkpoint: manifest there, folder not renamed": Point(
        "tasks.rl.checkpoint:fsync_folder", "before", 3
    ),
    "between fsync and rename of a file": Point("tasks.artifacts.atomic:os.replace", "before", 14),
    "checkpoint renamed, old ones not forgotten": Point(
        "tasks.rl.checkpoint:fsync_folder", "after", 3
    ),
    "an old checkpoint half removed": Point(
        "tasks.rl.checkpoint:Checkpoints._finished", "after", 4
    ),
    "last step taken, final rollouts not sampled": Point(
        "tasks.rl.stage:final_rollouts", "before", 1
    ),
    "final rollouts sampled, policy not written": Point(f"{LEARNER}.save_policy", "before", 1),
    "policy written, no summary": Point("tasks.rl.stage:write_jsonl", "before", 1),
}


class Stage:
    """One process that forks a child for every run asked of it."""

    def __init__(self, folder: Path, *asked) -> None:
        """`asked`: config, data and snapshot."""
        self._folder, self._asked = folder, asked
        self._log = (folder / "stage.log").open("w+")
        answers, given = os.pipe()
        self._process = subprocess.Popen(
            [*CHILD, str(given)],
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(given,),
            text=True,
        )
        os.close(given)
        self._answers = os.fdopen(answers)

    def run(self, name: str, kill: Point | None = None) -> int:
        """Run the stage in the folder `name`, to its end or to a point; the exit status."""
        order = order_of(*self._asked, self._folder / name, kill)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        said = self._answers.readline().strip()
        assert said, self.said()
        return int(said)

    def said(self) -> str:
        """The end of what the children wrote."""
        return Path(self._log.name).read_text()[-3000:]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._answers.close()
        self._log.close()


@pytest.fixture(scope="module")
def stage(tiny_config, tiny_data, tiny_snapshot, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    config = tiny_config(rl={"steps": STEPS})
    runs = Stage(folder, config, tiny_data, tiny_snapshot)
    yield runs, folder
    runs.close()


def outcome(folder: Path) -> dict[str, object]:
    """What must be the same: weights, trained rows, final samples, metrics that are no times."""
    rollouts = [json.loads(x) for x in (folder / "rollouts.jsonl").read_text().splitlines()]
    for rollout in rollouts:
        for turn in rollout["turns"]:
            del turn["policy_version"]  # names the attempt
            turn.pop("spans", None)
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "policy": hash_model(folder / "policy"),
        "trained": (folder / "trained_rows.jsonl").read_text(),
        "rollouts": rollouts,
        "metrics": [
            (m["step"], {k: v for k, v in m["values"].items() if k not in TIMED})
            for m in read_metrics(folder / "metrics.jsonl")
        ],
        "samples": (summary["samples"], summary["prompts_dispatched"]),
    }


@pytest.mark.figure("rl_kill_points")
def test_killed_at_any_point_the_run_ends_as_if_it_never_was(stage):
    runs, folder = stage
    assert runs.run("never") == 0, runs.said()
    never = outcome(folder / "never")
    same, wrong = [], {}
    for number, (name, point) in enumerate(POINTS.items()):
        run = f"{number:02d}"
        killed = runs.run(run, point)
        if killed != -9:
            wrong[name] = f"was not killed there: exit status {killed}"
        elif runs.run(run) != 0:
            wrong[name] = f"did not resume: {runs.said()[-600:]}"
        elif different := [k for k, v in outcome(folder / run).items() if v != never[k]]:
            wrong[name] = f"differs in {', '.join(different)}"
        elif left := [str(p) for p in (folder / run).rglob("*.partial")]:
            wrong[name] = f"left {left}"
        else:
            same.append(name)
        print(f"{name}: {wrong.get(name, 'same rows, same weights')}")
    record(
        "rl_kill_points",
        value=len(same) / len(POINTS),
        met=not wrong,
        seeds=[0],
        note=f"{len(POINTS)} points, {STEPS} steps each; SIGKILL, then resumed",
        details={"same": same, "wrong": wrong},
    )
    assert not wrong
