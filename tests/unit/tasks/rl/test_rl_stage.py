"""The whole RL stage on a real tiny model: repeatable, killable, asynchronous where it may be."""

import asyncio
import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.artifacts.progress import Reporter, read_metrics
from tasks.artifacts.record import ArtifactRecord
from tasks.models.load import hash_model
from tasks.rl.controllers import linear_anneal
from tasks.rl.errors import CheckpointMismatchError, NoPromptsError
from tasks.rl.grader import weigh
from tasks.rl.learner import Learner
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.rollout_worker import RolloutWorker
from tasks.rl.sentinel import Decision, RewardSentinel
from tasks.rl.stage import FINAL_BATCHES, run, training_rows
from tests.faults.rl_stage_order import order_of
from tests.faults.rl_stage_order import start as start_child


@pytest.fixture
def stage(tiny_config, tiny_data, tiny_snapshot, tmp_path):
    """Run the stage in this process: `stage("name", steps=3)` gives record and folder."""
    inputs = {"data": tiny_data.record, "sft": tiny_snapshot.record}

    def build(name: str, **rl) -> tuple[ArtifactRecord, Path]:
        out = tmp_path / name
        record = run(tiny_config(rl=rl), inputs, out, Reporter(out))
        return record, out

    return build


def lines(folder: Path) -> list[dict]:
    return [json.loads(x) for x in (folder / "rollouts.jsonl").read_text().splitlines()]


def learnt(folder: Path) -> list[tuple[int, dict]]:
    """Metrics of each step, without those that measure time."""
    timed = {"rollout_tokens_per_s", "train_tokens_per_s", "overlap_share"}
    return [
        (m["step"], {k: v for k, v in m["values"].items() if k not in timed})
        for m in read_metrics(folder / "metrics.jsonl")
    ]


def test_the_same_config_gives_the_same_policy_and_ids(stage):
    (one, first), (two, second) = stage("one"), stage("two")
    assert one.sha256 == two.sha256 == hash_model(first / "policy")
    assert (first / "rollouts.jsonl").read_bytes() == (second / "rollouts.jsonl").read_bytes()
    assert learnt(first) == learnt(second) and len(learnt(first)) == 4
    other, _ = stage("other", seed=1)
    assert other.sha256 != one.sha256


def test_a_limit_of_0_equals_a_plain_synchronous_loop(
    stage, tiny_config, tiny_data, tiny_snapshot, tmp_path
):
    """X5, bit for bit: sample, grade, train, publish, one after another, without the loop."""
    record, _ = stage("asynchronous")
    config = tiny_config()
    rl, rows = config.rl, tiny_data.rows
    learner = Learner(config, tiny_snapshot.folder, tiny_snapshot.sha256, rows)
    worker = RolloutWorker(config, tiny_snapshot.folder, rows)
    queue = PromptQueue([row.id for row in rows], rl.seed)
    sentinel = RewardSentinel(rl.sentinel)
    while learner.learner_version < rl.steps:
        asyncio.run(worker.sync(learner.publish(tmp_path / "publish", attempt=0)))
        temperature = linear_anneal(rl.sampling.temperature, learner.learner_version)
        tickets = queue.take(rl.batch_size // rl.group_size)
        played = asyncio.run(worker.play(tickets, rl.group_size, temperature))
        groups = [
            replace(g, rollouts=tuple(weigh(g.rollouts, rl.reward, learner.learner_version)))
            for g in worker.grade(played.rollouts)
        ]
        suspicion = sentinel.observe([r.outcome for g in groups for r in g.rollouts])
        if suspicion and sentinel.judge(suspicion, worker.probe()) is not Decision.TRAIN:
            continue
        learner.train(groups, rl.kl.coefficient)
    assert learner.save_policy(tmp_path / "synchronous") == record.sha256


def test_what_the_stage_leaves(stage, tiny_config, tiny_snapshot):
    record, out = stage("run")
    summary = json.loads((out / "summary.json").read_text())
    assert record.kind == "model" and record.meta == summary
    assert (summary["steps"], summary["samples"], summary["resumes"]) == (4, 32, 0)
    assert summary["max_staleness_seen"] == summary["skipped_steps"] == 0
    assert summary["sync_proofs"] == 5  # the first publish, and one a step
    assert record.sha256 != tiny_snapshot.sha256
    assert (out / "adapter" / "weights.safetensors").exists()
    ledger = json.loads((out / "ledger.json").read_text())
    measured = sum(sum(states.values()) for states in ledger["seconds"].values())
    wall_s, slots = ledger["earlier_wall_s"], len(ledger["seconds"])
    # Half a second of work: the 1 % the books must meet would judge this machine, not them.
    assert abs(measured - wall_s * slots) <= 0.1 * wall_s * slots
    assert summary["ledger"]["wall_s"] == wall_s and summary["ledger"]["slots"] == slots == 1
    assert ledger["samples"]["trained"] == 32


def test_final_rollouts_are_whole_and_split(stage):
    _, out = stage("run")
    rows = lines(out)
    assert len(rows) == FINAL_BATCHES * 8
    assert [r["split"] for r in rows] == ["imatrix"] * 16 + ["parity"] * 8
    for row in rows:
        lengths = {len(row[k]) for k in ("token_ids", "action_mask", "sampler_logprobs")}
        assert len(lengths) == 1 and row["messages"][0]["role"] == "user"
        assert {tuple(t["policy_version"]) for t in row["turns"]} == {(0, 4)}
        spans = {i for t in row["turns"] for i in range(t["start"], t["end"])}
        assert spans == {i for i, m in enumerate(row["action_mask"]) if m}
    assert len({r["row_id"] for r in rows}) > 16


@pytest.fixture
def killed(tiny_config, tiny_data, tiny_snapshot, tmp_path):
    """Run the stage in a process and kill it once a checkpoint of `step` stands."""

    def start(name: str, **rl) -> tuple[subprocess.Popen, Path]:
        out = tmp_path / name
        order = order_of(tiny_config(rl=rl), tiny_data, tiny_snapshot, out)
        return start_child(order, tmp_path / f"{name}.log"), out

    def build(name: str, step: int, **rl) -> Path:
        process, out = start(name, **rl)
        awaited = out / "checkpoints" / f"step-{step:06d}" / "manifest.json"
        deadline = time.monotonic() + 120
        while not awaited.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL, (tmp_path / f"{name}.log").read_text()[-2000:]
        return out

    return build


def test_killed_and_resumed_gives_the_policy_and_ids_of_a_run_never_killed(stage, killed):
    whole, never = stage("never", steps=8)
    out = killed("run", 3, steps=8)
    assert not (out / "summary.json").exists()
    resumed, _ = stage("run", steps=8)
    assert resumed.sha256 == whole.sha256
    assert resumed.meta["resumes"] == 1 and whole.meta["resumes"] == 0
    rows = [json.loads(x) for x in (out / "trained_rows.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 9))
    never_killed = whole.path / "trained_rows.jsonl"
    assert (out / "trained_rows.jsonl").read_bytes() == never_killed.read_bytes()
    assert learnt(out) == learnt(never)
    for ours, theirs in zip(lines(out), lines(never), strict=True):
        for row in (ours, theirs):
            for turn in row["turns"]:
                turn.pop("policy_version")  # carries the attempt
        assert ours == theirs
    for key in ("samples", "effective_samples", "prompts_dispatched", "suspicious_batches"):
        assert resumed.meta[key] == whole.meta[key], key


def test_a_limit_of_2_ages_samples_and_never_beyond(stage):
    record, out = stage("run", staleness_limit=2, steps=9)
    ages = [values["staleness_max"] for _, values in learnt(out)]
    assert 1 <= max(ages) == record.meta["max_staleness_seen"] <= 2
    assert record.meta["steps"] == 9 and record.meta["samples"] == 72


def test_a_finished_run_asked_again_gives_the_same(stage):
    first, out = stage("run")
    again, _ = stage("run")
    assert again.sha256 == first.sha256 and again.meta["resumes"] == 1
    assert len(learnt(out)) == 4


def test_another_config_does_not_go_on_from_these_checkpoints(stage):
    stage("run")
    with pytest.raises(CheckpointMismatchError, match="config differ"):
        stage("run", steps=5)


def test_bands_choose_rows_and_an_empty_choice_is_named(tiny_data):
    path = tiny_data.record.path / "train.jsonl"
    assert len(training_rows(path, [])) == len(training_rows(path, ["easy", "hard"])) == 50
    with pytest.raises(NoPromptsError, match=r"\['hard'\].*\['easy'\]"):
        training_rows(path, ["hard"])
