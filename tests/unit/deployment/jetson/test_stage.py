import dataclasses
import json
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest

from configs.schema.package import PackageConfig
from deployment.jetson import stage
from deployment.jetson.errors import (
    GoldenPromptError,
    MissingInputError,
    NothingShipsError,
    PackageError,
    UnknownToolError,
)
from deployment.jetson.facts import BundleFacts
from deployment.jetson.stage import choose_quantisations
from tasks.artifacts import hash_file, hash_tree, write_json
from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.progress import Reporter

SHIPS, REJECTED = {"ships": True}, {"ships": False, "why": "rejected: too different"}


def _run(stages, facts, out, config=None, **records):
    config = config or PackageConfig(context_length=256)
    return stage.run(config, {**stages.records, **records}, out, Reporter(out), facts=facts)


def _moved(record, folder):
    """The record, pointing at a copy in `folder` that may be spoilt."""
    shutil.copytree(record.path, folder)
    return record.model_copy(update={"uri": str(folder)})


def test_record_names_everything(package):
    meta = package.record.meta
    assert package.record.kind == "bundle"
    assert package.record.sha256 == hash_file(package.bundle / "manifest.json")
    assert package.archive.name == f"agent-{package.record.sha256[:12]}.tar.gz"
    assert meta["archive_sha256"] == hash_file(package.archive)
    assert (meta["signed"], meta["default"], meta["quantisations"]) == (True, "Q8_0", ["Q8_0"])
    assert sorted(p.name for p in package.bundle.parent.iterdir()) == sorted(
        ["bundle", package.archive.name, "measured.json", "progress.json"]
    )


def test_same_inputs_same_bytes(package, stages, facts, tmp_path):
    again = _run(stages, facts, tmp_path)
    assert again.sha256 == package.record.sha256
    assert hash_tree(Path(again.meta["bundle"])) == hash_tree(package.bundle)
    assert again.meta["archive_sha256"] == package.record.meta["archive_sha256"]


def test_manifest_says_what_the_device_must_know(package, stages):
    manifest = package.manifest
    assert manifest["mlflow"] == {"run_id": "f" * 32, "tracking_uri": "sqlite:///runs/mlflow.db"}
    assert manifest["serving"]["sampling"]["repeat_penalty"] == 1.0
    assert manifest["serving"]["context_length"] == 256
    assert manifest["parity"]["Q8_0"]["kld_mean"] == 1e-5
    assert manifest["models"]["Q8_0"]["bits_per_weight"] == 8.5
    assert manifest["models"]["Q8_0"]["sha256"] == hash_file(stages.quantised / "Q8_0.gguf")
    assert manifest["l4t"] == {"min": "36.0", "max_major": 36}
    assert "<|im_start|>" in manifest["prompt"]["chat_template"]
    assert set(manifest["prompt"]["special_strings"]) == {"<|pad|>", "<|im_start|>", "<|im_end|>"}
    assert manifest["lineage"]["rl"] == "1" * 64
    assert manifest["lineage"]["config"] == "3" * 64
    on_disk = {p.relative_to(package.bundle).as_posix() for p in package.bundle.rglob("*.*")}
    assert set(manifest["files"]) | {"manifest.json", "manifest.json.sig"} >= on_disk


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="openssh-client is not installed")
def test_the_command_in_the_model_card_accepts_the_bundle(package):
    card = (package.bundle / "model_card.md").read_text()
    block = card.partition("    ssh-keygen")[2].partition("\n\n")[0]
    command = ("ssh-keygen" + block).replace("/etc/rl-pipeline/allowed_signers", str(package.pin))
    done = subprocess.run(
        ["bash", "-c", command], cwd=package.bundle, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('Good "rl-pipeline-bundle" signature for rl-pipeline')


def test_size_memory_and_speed_are_predicted_and_measured(package):
    """Signed: what is the same on every machine. Beside the bundle: what this machine did."""
    entry = package.manifest["models"]["Q8_0"]
    assert entry["predicted"]["file_bytes"] == pytest.approx(entry["size"], rel=0.02)
    for name, size in entry["reported"].items():
        assert entry["memory"][name] == pytest.approx(size, rel=0.05, abs=5300), name
    beside = json.loads((package.bundle.parent / "measured.json").read_bytes())
    assert beside == package.record.meta["measured"]
    assert beside["Q8_0"]["buffers"] == entry["reported"]
    assert beside["Q8_0"]["decode_tokens_per_s"] > 0
    assert "measured.json" not in package.manifest["files"]


def test_model_card_and_notice(package):
    card = (package.bundle / "model_card.md").read_text()
    assert "| Q8_0 | yes |" in card
    assert (
        "| IQ2_M | no | 9 | unknown | unknown | unknown | unknown | rejected: accuracy fell |"
        in card
    )
    assert "- Difference: +0.500, 95 % interval 0.450 to 0.550" in card
    assert "$" not in card + (package.bundle / "NOTICE").read_text()
    size = (package.bundle / "models/Q8_0.gguf").stat().st_size
    planned = package.manifest["models"]["Q8_0"]
    memory = planned["memory"]["total_bytes"] >> 20
    assert f"| Q8_0 | {size} | {planned['predicted']['file_bytes']} | {memory} | " in card
    assert package.manifest["llama_cpp_source"]["sha256"] in card
    assert "Apache License" in (package.bundle / "LICENSE").read_text()


def test_device_code_is_the_training_code_verbatim(package):
    for name in stage.FROM_TRAINING:
        source = Path("tasks/environments", name)
        assert (package.bundle / name).read_bytes() == source.read_bytes()


def test_leftovers_of_a_killed_attempt_go(stages, facts, tmp_path):
    (tmp_path / ".bundle.1" / "models").mkdir(parents=True)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "old").write_text("x")
    (tmp_path / "agent-000000000000.tar.gz").write_text("old")
    record = _run(stages, facts, tmp_path)
    assert not (tmp_path / ".bundle.1").exists()
    assert not (tmp_path / "bundle" / "old").exists()
    assert [p.name for p in tmp_path.glob("*.tar.gz")] == [Path(record.meta["archive"]).name]


@pytest.mark.parametrize(
    ("parity", "prefer", "right"),
    [
        ({"Q8_0": SHIPS, "Q4_K_M": SHIPS}, ("Q4_K_M", "Q8_0"), ("Q4_K_M", ("Q4_K_M", "Q8_0"))),
        ({"Q8_0": SHIPS, "Q4_K_M": REJECTED}, ("Q4_K_M", "Q8_0"), ("Q8_0", ("Q8_0",))),
        ({"F16": SHIPS, "Q8_0": SHIPS}, ("Q8_0",), ("Q8_0", ("Q8_0",))),
    ],
)
def test_default_is_the_first_preferred_that_ships(parity, prefer, right):
    assert choose_quantisations(parity, prefer) == right


@pytest.mark.parametrize(
    "parity",
    [
        {"Q8_0": REJECTED, "F16": SHIPS},
        {"Q8_0": {}},
        {"Q8_0": {"ships": None}},
        {"Q8_0": {"ships": "no"}},
        {"Q5_K_M": SHIPS},
    ],
)
def test_nothing_ships_is_an_error_that_says_why(parity):
    with pytest.raises(NothingShipsError, match="ships") as caught:
        choose_quantisations(parity, ("Q8_0", "Q4_K_M"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def _left(folder):
    return sorted(p.name for p in folder.iterdir() if p.name != "progress.json")


def test_tool_without_code_is_an_error(stages, facts, tmp_path):
    with pytest.raises(UnknownToolError, match="browser"):
        _run(stages, dataclasses.replace(facts, tools=("calc", "browser")), tmp_path)
    assert _left(tmp_path) == []


@pytest.mark.parametrize(
    "config",
    [PackageConfig(l4t_min="37.0"), PackageConfig(l4t_min="new")],
)
def test_l4t_range_that_no_device_meets(stages, facts, tmp_path, config):
    with pytest.raises(PackageError, match=r"package\.l4t_min"):
        _run(stages, facts, tmp_path, config)


@pytest.mark.parametrize("name", ["quantize", "rl", "evaluation"])
def test_missing_stage_is_named(stages, facts, tmp_path, name):
    records = {k: v for k, v in stages.records.items() if k != name}
    with pytest.raises(MissingInputError, match=name):
        stage.run(PackageConfig(), records, tmp_path, Reporter(tmp_path), facts=facts)


@pytest.mark.parametrize(
    ("name", "file", "content", "match"),
    [
        ("quantize", "parity.json", None, "parity.json"),
        ("quantize", "parity.json", b"{", "parity.json"),
        ("quantize", "parity.json", b"{}", 'no "quant"'),
        ("quantize", "Q8_0.gguf", None, "missing though Q8_0 ships"),
        ("quantize", "Q8_0.gguf", b"GGUFgarbage", "quantise again"),
        ("rl", "rollouts.jsonl", None, "rollouts.jsonl"),
        ("rl", "rollouts.jsonl", b"", "no conversation"),
        ("rl", "rollouts.jsonl", b'{"a": 1}\n', "line 1"),
        ("rl", "policy/tokenizer_config.json", None, "no tokenizer"),
        ("evaluation", "summary.json", None, "summary.json"),
    ],
)
def test_spoilt_input_is_named_and_nothing_is_left(
    stages, facts, tmp_path, name, file, content, match
):
    record = _moved(stages.records[name], tmp_path / "input")
    if content is None:
        (record.path / file).unlink()
    else:
        (record.path / file).write_bytes(content)
    out = tmp_path / "out"
    with pytest.raises(MissingInputError, match=match):
        _run(stages, facts, out, **{name: record})
    assert _left(out) == []


def test_another_chat_template_in_training_is_caught(stages, facts, tmp_path):
    record = _moved(stages.records["rl"], tmp_path / "rl")
    changed = 0
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = record.path / "policy" / name
        if path.exists():
            old = path.read_text()
            path.write_text(old.replace("assistant", "asistant"))
            changed += "assistant" in old
    assert changed
    with pytest.raises(GoldenPromptError, match="renders"):
        _run(stages, facts, tmp_path / "out", rl=record)


def test_another_tokenizer_in_training_is_caught(stages, facts, tmp_path):
    """Two merges swapped: same text, other ids."""
    record = _moved(stages.records["rl"], tmp_path / "rl")
    path = record.path / "policy" / "tokenizer.json"
    spec = json.loads(path.read_bytes())
    spec["model"]["merges"] = spec["model"]["merges"][:1]
    write_json(path, spec)
    with pytest.raises(GoldenPromptError, match="pre-tokenizer or token types"):
        _run(stages, facts, tmp_path / "out", rl=record)


def test_context_too_short_for_every_prompt(stages, facts, tmp_path):
    record = _moved(stages.records["rl"], tmp_path / "rl")
    long = {"messages": [{"role": "user", "content": "7" * 300}]}
    (record.path / "rollouts.jsonl").write_text(json.dumps(long) + "\n")
    with pytest.raises(GoldenPromptError, match=r"package\.context_length"):
        _run(stages, facts, tmp_path / "out", rl=record)


def test_disk_that_refuses_is_told_and_leaves_nothing(stages, facts, tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage.shutil, "copyfile", refuse)
    with pytest.raises(ArtifactWriteError, match="No space left on device"):
        _run(stages, facts, tmp_path)
    assert _left(tmp_path) == []


def test_licence_of_the_base_model(stages, facts, tmp_path):
    (tmp_path / "L").write_text("my licence\n")
    named = dataclasses.replace(facts, license_file=tmp_path / "L")
    record = _run(stages, named, tmp_path / "out")
    assert Path(record.meta["bundle"], "LICENSE").read_text() == "my licence\n"
    gone = dataclasses.replace(facts, license_file=tmp_path / "gone")
    with pytest.raises(MissingInputError, match="licence file"):
        _run(stages, gone, tmp_path / "out2")


def test_facts_come_from_the_config_without_passwords():
    from configs.schema.pipeline import PipelineConfig

    made = BundleFacts.from_config(
        PipelineConfig(),
        git_sha="a" * 40,
        git_dirty=True,
        lineage={"data": "d"},
        mlflow_run_id="r",
        mlflow_tracking_uri="https://me:secret@tracking.example:5000/x",
    )
    assert made.mlflow_tracking_uri == "https://tracking.example:5000/x"
    assert (made.tools, made.limits.max_turns, made.limits.max_new_tokens) == (("calc",), 2, 64)
    assert made.base_model == "made from scratch (profile calculator)"
