"""`configs/calculator_vllm.yaml` as a user runs it: SFT, RL on vLLM over Ray, evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from tasks.artifacts.progress import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_vllm_profile_runs_from_sft_to_evaluation(tmp_path):
    runs = tmp_path / "runs"
    done = subprocess.run(
        [
            sys.executable, "-m", "flows.cli", "run", "-c", "configs/calculator_vllm.yaml",
            "--runs", str(runs), "--stop-after", "evaluation",
        ],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (rl,) = (p for p in (runs / "store" / "rl").iterdir() if p.is_dir())
    summary = json.loads((rl / "summary.json").read_text())
    config = load_config("calculator_vllm")
    assert summary["steps"] == config.rl.steps
    assert summary["sync_proofs"] >= config.rl.steps
    assert 0 <= summary["max_staleness_seen"] <= config.rl.staleness_limit
    steps = [m["values"] for m in read_metrics(rl / "metrics.jsonl")]
    # a step between two proofs tells of none; float32 on both sides
    distances = [v["canary_distance"] for v in steps if "canary_distance" in v]
    assert distances and max(distances) < 1e-4
    fresh = [v for v in steps if v["staleness_mean"] == 0]
    assert fresh, steps
    # on the weights that sampled, the learner gives each token the very logprob vLLM gave it
    assert max(v["log_ratio_abs_max"] for v in fresh) < 1e-3
    rollouts = [json.loads(x) for x in (rl / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 3 * config.rl.batch_size
    newest = max(turn["policy_version"] for r in rollouts for turn in r["turns"])
    assert newest[1] == config.rl.steps
    assert list((runs / "store" / "evaluation").iterdir())
