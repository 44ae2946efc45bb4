"""`rl-pipeline quantise` on a tiny run: what it writes, what it picks, what it says otherwise."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from typer.testing import CliRunner

from configs.load import load_config
from configs.schema.model import ScratchModel
from flows.cli import app
from flows.fidelity.frontier_plot import plot
from flows.fidelity.quantise import NoPolicyError, find_policy
from quantize.frontier import Point
from tasks.artifacts import write_json, write_jsonl
from tasks.artifacts.bootstrap import Interval

CONVERSATION = [
    {"role": "user", "content": "34*7-52=?"},
    {"role": "assistant", "content": "186"},
]
SETTINGS = [
    "quantize.parity_rollouts=4",
    "quantize.imatrix_rollouts=4",
    "quantize.accuracy_problems=6",
    "quantize.parallel_sequences=4",
    "quantize.repair.rollouts=2",
    "evaluation.sampling.max_new_tokens=4",
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run that stopped after RL: a policy of one layer, its rollouts, held-out rows."""
    from tasks.models.scratch import build_model, demonstration_texts, train_tokenizer

    root = tmp_path_factory.mktemp("quantise")
    store = root / "runs/tiny-store"
    tokenizer = train_tokenizer(demonstration_texts([CONVERSATION] * 3), 320)
    shape = ScratchModel(layers=1, ffn_size=256, vocab_size=320, max_length=128)
    build_model(shape, tokenizer, seed=0).save_pretrained(store / "rl/policy")
    tokenizer.save_pretrained(store / "rl/policy")
    rng = np.random.default_rng(0)
    lines = [
        {
            "token_ids": rng.integers(3, 200, 20).tolist(),
            "action_mask": [i > 4 for i in range(20)],
            "split": split,
        }
        for split in ("imatrix", "parity")
        for _ in range(4)
    ]
    write_jsonl(store / "rl/rollouts.jsonl", lines)
    rows = [{"id": f"r{i}", "prompt": f"{i}+1=?", "answer": str(i + 1)} for i in range(6)]
    write_jsonl(store / "data/heldout.jsonl", rows)
    run = root / "runs/20260101-000000-tiny"
    config = load_config("calculator", SETTINGS)
    write_json(run / "config.json", config.model_dump(mode="json"))
    records = {
        stage: {"kind": kind, "uri": f"runs/tiny-store/{stage}", "sha256": "0" * 64, "meta": {}}
        for stage, kind in (("rl", "model"), ("data", "dataset"))
    }
    write_json(run / "records.json", records)
    return run


@pytest.fixture(scope="module")
def quantised(run_dir):
    """The command, once."""
    sizes = ["--target-size", "270KB", "--threads", "1"]
    return CliRunner().invoke(app, ["quantise", str(run_dir), *sizes])


def test_it_writes_the_file_the_frontier_and_the_plots(quantised, run_dir):
    assert quantised.exit_code == 0, quantised.output
    out = run_dir / "quantise"
    written = json.loads((out / "frontier.json").read_text())
    points = {p["name"]: p for p in written["points"]}
    assert {"IQ2_M", "Q4_K_M", "Q5_K_M", "Q8_0"} < set(points)
    assert any("+" in name for name in points)
    picked = points[written["picked"]["name"]]
    fitting = [p for p in points.values() if p["size_bytes"] <= 270_000]
    assert len(fitting) > 1
    assert picked["kld_mean"] == min(p["kld_mean"] for p in fitting)
    file = out / f"{picked['name']}.gguf"
    # the key that holds the file's true name may take a few bytes more than the spliced file
    assert abs(file.stat().st_size - picked["size_bytes"]) < 256
    types = {t.name: t.tensor_type.name for t in GGUFReader(file).tensors}
    assert picked["raised"].items() <= types.items()
    assert all(len(p["accuracy_ci95"]) == 2 for p in points.values())
    assert (out / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "frontier.svg").read_text().count("<svg") == 1
    assert not (out / ".work").exists()


def test_it_says_what_it_picked_and_why(quantised):
    assert "picked " in quantised.output and "lies nearest to F16" in quantised.output
    assert "→" in quantised.output and "accuracy, 95 %" in quantised.output


def test_a_policy_folder_without_problems_cannot_promise_accuracy(run_dir):
    store = run_dir.parent / "tiny-store"
    found = find_policy(store / "rl", load_config("calculator", SETTINGS), None)
    assert found.data is None and found.made is None
    assert found.folder == store / "rl/policy"
    same = find_policy(store / "rl/policy", None, store / "data")
    assert same.folder == found.folder and same.data is not None


@pytest.mark.parametrize(
    ("missing", "said"),
    [("", "neither a run's folder"), ("rollouts", "no rollouts at")],
)
def test_what_is_missing_is_named(missing, said, tmp_path):
    if missing:
        write_json(tmp_path / "policy/config.json", {})
    with pytest.raises(NoPolicyError, match=said):
        find_policy(tmp_path, None, None)


def test_a_run_whose_policy_is_gone(tmp_path):
    write_json(tmp_path / "records.json", {})
    write_json(tmp_path / "config.json", {})
    with pytest.raises(NoPolicyError, match="no policy"):
        find_policy(tmp_path, None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "exactly one of"),
        (["--target-size", "600KB", "--type", "Q8_0"], "exactly one of"),
        (["--target-size", "much"], "--target-size 'much'"),
        (["--target-accuracy", "97"], "expected a share"),
    ],
)
def test_a_wish_that_cannot_be_understood_is_one_clear_message(arguments, said, run_dir):
    result = CliRunner().invoke(app, ["quantise", str(run_dir), *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split()) and "Traceback" not in result.output


def test_an_unknown_type_is_refused_before_any_work(run_dir, tmp_path):
    arguments = ["quantise", str(run_dir), "--type", "Q9", "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "--type Q9: expected one of IQ2_M" in result.output
    assert not (tmp_path / "x").exists()


def test_help_teaches_with_an_example():
    result = CliRunner().invoke(app, ["quantise", "--help"])
    assert "rl-pipeline quantise runs/latest --target-size 600KB" in " ".join(result.output.split())


def made(name, size, kld, accuracy):
    interval = None if accuracy is None else Interval(accuracy, accuracy - 0.1, accuracy)
    return Point(name, size, 4.0, Interval(kld, kld, kld), interval, True)


@pytest.mark.parametrize("accuracy", [None, 0.9])
def test_the_plot_takes_a_kl_of_nought_and_is_the_same_twice(accuracy, tmp_path):
    points = [made("IQ2_M", 500, 0.1, accuracy), made("Q8_0", 900, 0.0, accuracy)]
    png, svg = plot(points, points[0], tmp_path)
    first = svg.read_bytes(), png.read_bytes()
    plot(points, points[0], tmp_path)
    assert (svg.read_bytes(), png.read_bytes()) == first
