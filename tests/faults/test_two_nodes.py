"""Training across two machines that share no disk; one is cut off half-way, and the run goes on."""

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
from two_nodes import TwoNodes, namespaces_refused, wait_until

from tasks.artifacts.progress import read_metrics
from tests.faults.rl_stage_order import CHILD, ROOT, give, order_of
from tests.figures.record import record
from tests.tiny_run import tiny_config, tiny_data, tiny_snapshot, tiny_tokenizer

__all__ = ["tiny_config", "tiny_data", "tiny_snapshot", "tiny_tokenizer"]
pytestmark = [pytest.mark.faults, pytest.mark.needs("ip", "unshare")]
STEPS = 40
RUNTIME = {
    "type": "ray",
    "rollout_workers": 2,
    "learner_threads": 2,  # two CPUs in one place: only the head has them, so that is where it runs
    "placement": "spread",
    "start_timeout_s": 120,
}


@pytest.fixture
def nodes(tmp_path):
    """Head: learner, one rollout worker, one place left. Node: one rollout worker."""
    refused = namespaces_refused()
    if refused is not None:
        pytest.skip(f"this machine allows no network namespaces ({refused}): run as root")
    with tempfile.TemporaryDirectory(prefix="rn", dir="/tmp") as short:
        cluster = TwoNodes(head_cpus=4, node_cpus=1, hidden=tmp_path, temporary=Path(short))
        try:
            yield cluster
        finally:
            cluster.close()


def stage_on(cluster: TwoNodes, folder: Path, config, data, snapshot):
    """The RL stage on the head's machine; `rl/` and `log` in `folder` are its own."""
    with (folder / "log").open("w") as log:
        child = cluster.popen(
            cluster.head, CHILD, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
        )
    give(order_of(config, data, snapshot, folder / "rl"), child)
    return child


def steps_told(folder: Path) -> int:
    """Optimiser steps that have a line in the metrics."""
    path = folder / "rl" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.figure("two_nodes_one_cut_off")
@pytest.mark.timeout(600)
def test_a_run_over_two_nodes_goes_on_when_one_is_cut_off(
    nodes, tiny_config, tiny_data, tiny_snapshot, tmp_path
):
    config = tiny_config(
        rl={"steps": STEPS, "staleness_limit": 2, "runtime": RUNTIME | {"address": nodes.address}}
    )
    process = stage_on(nodes, tmp_path, config, tiny_data, tiny_snapshot)
    log = tmp_path / "log"
    wait_until(lambda: steps_told(tmp_path) >= 5 or process.poll() is not None, 240, "five steps")
    assert process.poll() is None, log.read_text()[-3000:]
    on_head, on_node = nodes.actors(nodes.head), nodes.actors(nodes.node)
    nodes.cut()
    assert process.wait(240) == 0, log.read_text()[-3000:]

    meta = json.loads((tmp_path / "rl" / "record.json").read_text())["meta"]
    spent = json.loads((tmp_path / "rl" / "ledger.json").read_text())["seconds"]
    checks = {
        "learner and a worker ran on the head": sorted(on_head) == ["LearnerActor", "RolloutActor"],
        "a worker ran on the node": on_node == ["RolloutActor"],
        "both workers sampled": all(spent[f"rollout-{i}"]["rollout"] > 0 for i in range(2)),
        "one loss was noticed": meta["worker_losses"] == 1,
        "a replacement ran on the head": "a replacement starts" in log.read_text(),
        "every step was taken once": [
            m["step"] for m in read_metrics(tmp_path / "rl" / "metrics.jsonl")
        ]
        == list(range(1, STEPS + 1)),
        "no sample was too old": 0 <= meta["max_staleness_seen"] <= 2,
        "the run was not resumed": meta["resumes"] == 0,
        "the books balance": meta["ledger"]["balanced"],
    }
    failed = [name for name, holds in checks.items() if not holds]
    record(
        "two_nodes_one_cut_off",
        value=1 - len(failed) / len(checks),
        met=not failed,
        note="; ".join(failed),
        details={"steps": STEPS, "ledger_seconds": spent},
    )
    assert not failed, (failed, meta)
