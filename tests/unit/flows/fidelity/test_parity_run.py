"""`rl-pipeline parity` on a small real run and its bundle, and what it says of bad input."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "quantize"))
from tiny_models import make_model, make_tokenizer, save

from configs.schema import PipelineConfig
from flows.cli import app
from flows.fidelity.parity import ParityInputError, sides_of
from quantize.convert import convert
from quantize.quantise import quantise
from tasks.artifacts import hash_file, write_json, write_jsonl

PROBLEMS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs with one run: an untrained model, real GGUF files, twelve problems."""
    root = tmp_path_factory.mktemp("parity")
    store = root / "runs" / "store"
    rows = [
        {
            "id": f"row-{i}",
            "prompt": f"{i}+{i}=?",
            "answer": str(2 * i),
            "answer_kind": "number",
            "band": "easy",
        }
        for i in range(PROBLEMS)
    ]
    (store / "data").mkdir(parents=True)
    write_jsonl(store / "data" / "heldout.jsonl", rows)
    save(make_model("qwen3"), make_tokenizer(), store / "rl" / "policy")
    save(make_model("qwen3", seed=7), make_tokenizer(), store / "sft" / "snapshot")
    made = store / "quantize"
    made.mkdir()
    f16 = convert(store / "rl" / "policy", made / "F16.gguf").path
    for quant_type in ("Q8_0", "Q4_K_M"):
        quantise(f16, made / f"{quant_type}.gguf", quant_type)
    write_json(made / "parity.json", {"quant": {"F16": {}, "Q4_K_M": {}, "Q8_0": {}}})
    run_dir = root / "runs" / "20260101-tiny"
    records = {
        stage: {"kind": "x", "uri": str(store / stage), "sha256": f"{stage:0<64}", "meta": {}}
        for stage in ("data", "sft", "rl", "quantize")
    }
    write_json(run_dir / "records.json", records)
    config = PipelineConfig.model_validate(
        {"evaluation": {"sampling": {"max_new_tokens": 5, "max_turns": 1}}}
    )
    write_json(run_dir / "config.json", config.model_dump(mode="json"))
    return root / "runs"


@pytest.fixture(scope="module")
def bundle(runs, tmp_path_factory):
    """A bundle that holds one of the run's files."""
    folder = tmp_path_factory.mktemp("device") / "bundle"
    (folder / "models").mkdir(parents=True)
    model = folder / "models" / "Q4_K_M.gguf"
    shutil.copy(runs / "store/quantize/Q4_K_M.gguf", model)
    manifest = {
        "name": "agent",
        "lineage": {"quantize": f"{'quantize':0<64}"},
        "models": {"Q4_K_M": {"file": "models/Q4_K_M.gguf", "sha256": hash_file(model)}},
    }
    write_json(folder / "manifest.json", manifest)
    return folder


def parity(*arguments):
    return CliRunner().invoke(app, ["parity", *map(str, arguments)])


def test_a_run_is_compared_and_the_page_written(runs):
    run_dir = runs / "20260101-tiny"
    done = parity(run_dir, "--problems", 8, "--threads", 1)
    assert done.exit_code == 0, done.output
    found = json.loads((run_dir / "parity" / "side_by_side.json").read_bytes())
    assert set(found["files"]) == {"Q8_0", "Q4_K_M"} and found["problems"] == 8
    q8, q4 = found["files"]["Q8_0"], found["files"]["Q4_K_M"]
    assert 0 < q8["kl"]["value"] < q4["kl"]["value"]
    assert q8["identical"] >= q4["identical"]
    assert found["attribution"].endswith("95 % paired intervals.")
    assert "attribution" in found and found["rl_accuracy_delta"] is not None
    assert found["attribution"] in " ".join(done.output.split())
    assert (run_dir / "parity" / "parity.html").stat().st_size > 5000
    assert "Q4_K_M" in done.output and "8 held-out problems" in done.output


def test_the_report_shows_what_the_command_found(runs):
    from flows.report.page import write_report

    run_dir = runs / "20260101-tiny"
    parity(run_dir, "--problems", 4, "--threads", 1)
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "Against F16 on the same prompts" in text
    assert "the same 4 held-out problems" in text


def test_a_bundle_finds_the_run_that_made_it(runs, bundle, tmp_path):
    sides = sides_of(bundle, runs, 6)
    assert sides.run_dir.name == "20260101-tiny"
    assert sides.files == {"Q4_K_M": bundle / "models" / "Q4_K_M.gguf"}
    assert sides.f16 == runs / "store/quantize/F16.gguf" and len(sides.rows) == 6
    done = parity(bundle, "--runs", runs, "--problems", 3, "--threads", 1, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert {p.name for p in tmp_path.iterdir()} == {"parity.html", "side_by_side.json"}


def test_a_bundle_that_was_changed_is_not_compared(runs, bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    with (copy / "models" / "Q4_K_M.gguf").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    done = parity(copy, "--runs", runs)
    assert done.exit_code == 2 and "not the file its manifest names" in " ".join(
        done.output.split()
    )


def test_bad_input_is_one_message_that_says_what_to_do(runs, bundle, tmp_path):
    cases = {
        "neither a run's folder nor a bundle": (tmp_path / "nothing",),
        "no run in": (bundle, "--runs", tmp_path),
        "give --f16 FILE": (runs / "20260101-tiny", "--f16", tmp_path / "no.gguf"),
    }
    for said, arguments in cases.items():
        done = parity(*arguments)
        assert done.exit_code == 2, (said, done.output)
        assert said in " ".join(done.output.split()) and "Traceback" not in done.output


def test_a_run_that_did_not_get_so_far_names_the_stage(runs, tmp_path):
    run_dir = tmp_path / "half"
    records = json.loads((runs / "20260101-tiny" / "records.json").read_bytes())
    del records["quantize"]
    write_json(run_dir / "records.json", records)
    shutil.copy(runs / "20260101-tiny" / "config.json", run_dir)
    with pytest.raises(ParityInputError, match="no output of the stage quantize; finish the run"):
        sides_of(run_dir, runs, 4)
