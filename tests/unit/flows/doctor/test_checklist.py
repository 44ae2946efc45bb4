"""The pre-flight table."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from configs.load import load_config
from configs.schema import PipelineConfig
from flows.doctor.checklist import newest_records, run_checklist
from flows.doctor.checklist_run import (
    golden_conversation,
    other_renderers,
    quantised_parity,
    reference_is_snapshot,
    weights_sha256,
)
from flows.doctor.findings import Finding
from tasks.artifacts import ArtifactRecord, hash_tensors
from tasks.artifacts.provenance import project_root

PROFILE = "calculator"


def config_with(**overrides: object) -> PipelineConfig:
    """The schema's own defaults, changed by dotted keys (`__` for a dot)."""
    path = Path(__file__).parents[1] / "defaults.yaml"
    return load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


def row(name: str, config: PipelineConfig, records: dict | None = None) -> Finding:
    return next(f for f in run_checklist(config, records or {}) if f.name == name)


def test_the_default_profile_has_no_failing_row() -> None:
    findings = run_checklist(load_config(PROFILE), {})
    assert [f for f in findings if f.status == "fail"] == []
    assert len(findings) == 11
    assert all(f.looked_at for f in findings)
    assert all(f.remedy for f in findings if f.status in ("warn", "fail"))


def test_rows_without_a_run_are_open_not_passed() -> None:
    findings = {f.name: f.status for f in run_checklist(config_with(), {})}
    assert findings["reference identical to SFT model"] == "open"
    assert findings["quantisation parity"] == "open"
    assert findings["prompt format same as SFT"] == "pass"


@pytest.mark.parametrize(
    ("key", "value", "name", "status", "part"),
    [
        ("rl__trainable__r", 64, "LoRA", "warn", "16 to 32"),
        ("rl__trainable__alpha", 256, "LoRA", "warn", "alpha/r=16"),
        ("rl__trainable__targets", ["o_proj"], "LoRA", "warn", "q_proj, v_proj"),
        ("rl__optimiser__lr", 1e-3, "RL learning rate", "pass", ""),
        ("rl__optimiser__lr", 1e-5, "RL learning rate", "warn", "0.0001"),
        ("rl__optimiser__lr", 0.1, "RL learning rate", "fail", "leave the snapshot"),
        ("rl__sampling__temperature__start", 0.4, "sampling temperature", "warn", "0.5 to 1.5"),
        ("evaluation__sampling__temperature", 0.7, "sampling temperature", "warn",
         "evaluation.sampling.temperature=1"),
        ("rl__kl__coefficient", 0, "KL and clipping", "warn", "rl.kl.coefficient=0.001"),
        ("rl__kl__coefficient", 0.5, "KL and clipping", "warn", "above 0.1"),
        ("rl__loss__dual_clip", 1.1, "KL and clipping", "warn", "dual_clip"),
        ("rl__loss__clip_high", 0.9, "KL and clipping", "warn", "0.28"),
        ("evaluation__sampling__max_new_tokens", 16, "evaluation settings", "fail",
         "evaluation.sampling.max_new_tokens=64"),
        ("evaluation__sampling__max_new_tokens", 128, "evaluation settings", "warn", "=64"),
        ("evaluation__sampling__max_turns", 1, "evaluation settings", "fail", "max_turns=2"),
        ("package__context_length", 64, "quantisation format", "warn", "context_length"),
        ("quantize__accuracy_problems", 4000, "quantisation format", "warn", "heldout_rows=4000"),
    ],
)  # fmt: skip
def test_settings_out_of_the_ordinary_are_named(
    key: str, value: object, name: str, status: str, part: str
) -> None:
    finding = row(name, config_with(**{key: value}))
    assert finding.status == status, finding
    assert part in finding.remedy


def test_rows_not_divisible_by_256_are_named() -> None:
    config = config_with(model={"hidden_size": 192, "heads": 4, "kv_heads": 2})
    assert "no multiple of 256" in row("quantisation format", config).remedy


@pytest.mark.parametrize("kind", ["number", "code", "math", "text"])
def test_the_grader_is_probed_for_every_answer_kind(kind: str) -> None:
    config = load_config(
        "gsm8k_qwen2.5_0.5b", {"data.source.answer_kind": kind, "model.type": "scratch"}
    )
    finding = row("reward edge cases", config)
    assert finding.status == "pass", finding
    assert kind in finding.looked_at


def test_only_the_one_renderer_renders() -> None:
    assert other_renderers(project_root()) == []


def test_a_second_renderer_is_found(tmp_path: Path) -> None:
    sources = {
        "tasks/environments/renderer.py": "text = tokenizer.apply_chat_template(messages)\n",
        "tasks/rl/prompts.py": "text = tokenizer.apply_chat_template(messages)\n",
        "quantize/spaced.py": "text = tokenizer.apply_chat_template (messages)\n",
        "flows/by_name.py": "text = getattr(tokenizer, 'apply_chat_template')(messages)\n",
        "flows/innocent.py": "# calls no apply_chat_template\n",
    }
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert other_renderers(tmp_path) == [
        "tasks/rl/prompts.py", "flows/by_name.py", "quantize/spaced.py",
    ]  # fmt: skip


def test_golden_conversation_has_a_tool_turn_only_with_tools() -> None:
    assert [m["role"] for m in golden_conversation(["calc"])] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert [m["role"] for m in golden_conversation([])] == ["user", "assistant"]


@pytest.fixture
def snapshot(tmp_path: Path) -> dict[str, ArtifactRecord]:
    """An SFT record over a snapshot of two small tensors."""
    tensors = {"b": torch.arange(4.0), "a": torch.ones(2, 2)}
    folder = tmp_path / "sft" / "snapshot"
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "model.safetensors"))
    record = ArtifactRecord(kind="model", uri=str(tmp_path / "sft"), sha256=hash_tensors(tensors))
    return {"sft": record}


def rl_record(tmp_path: Path, **meta: str) -> ArtifactRecord:
    return ArtifactRecord(kind="model", uri=str(tmp_path / "rl"), sha256="0" * 64, meta=meta)


def test_weights_are_hashed_anew(snapshot: dict[str, ArtifactRecord]) -> None:
    sft = snapshot["sft"]
    assert weights_sha256(sft.path / "snapshot") == sft.sha256
    assert reference_is_snapshot(config_with(), snapshot).status == "pass"


def test_a_changed_snapshot_fails(snapshot: dict[str, ArtifactRecord]) -> None:
    folder = snapshot["sft"].path / "snapshot"
    tensors = {"b": torch.arange(4.0), "a": torch.ones(2, 2)}
    tensors["a"][0, 0] = 1.0000001
    save_file(tensors, str(folder / "model.safetensors"))
    finding = reference_is_snapshot(config_with(), snapshot)
    assert finding.status == "fail" and "--force sft" in finding.remedy


def test_the_reference_rl_used_is_compared(
    snapshot: dict[str, ArtifactRecord], tmp_path: Path
) -> None:
    sha = snapshot["sft"].sha256
    for meta, status in (
        ({"reference_sha256": sha}, "pass"),
        ({"reference_sha256": "f" * 64}, "fail"),
        ({}, "warn"),
    ):
        records = {**snapshot, "rl": rl_record(tmp_path, **meta)}
        assert reference_is_snapshot(config_with(), records).status == status


def test_the_reference_is_read_from_a_checkpoint(
    snapshot: dict[str, ArtifactRecord], tmp_path: Path
) -> None:
    folder = tmp_path / "rl" / "checkpoints" / "step-000004"
    folder.mkdir(parents=True)
    manifest = {"identity": {"snapshot": snapshot["sft"].sha256}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    records = {**snapshot, "rl": rl_record(tmp_path)}
    assert reference_is_snapshot(config_with(), records).status == "pass"


def test_a_missing_snapshot_fails(tmp_path: Path) -> None:
    record = ArtifactRecord(kind="model", uri=str(tmp_path / "gone"), sha256="0" * 64)
    assert reference_is_snapshot(config_with(), {"sft": record}).status == "fail"


@pytest.mark.parametrize(
    ("quant", "status"),
    [
        ({"F16": {"ships": True}, "Q8_0": {"ships": True}}, "pass"),
        ({"F16": {"ships": True}, "Q8_0": {"ships": False}}, "fail"),
        ({"F16": {"ships": True}, "Q8_0": {"ships": None}}, "fail"),
        ({"F16": {"ships": True}, "Q8_0": {"ships": "no"}}, "fail"),
        ({"F16": {"ships": True}, "Q4_K_M": {"ships": True}}, "warn"),
        ({}, "fail"),
    ],
)
def test_parity_verdicts_are_shown(tmp_path: Path, quant: dict, status: str) -> None:
    (tmp_path / "parity.json").write_text(json.dumps({"quant": quant}))
    record = ArtifactRecord(kind="quantisations", uri=str(tmp_path), sha256="0" * 64)
    config = config_with(quantize__types=["Q8_0"])
    assert quantised_parity(config, {"quantize": record}).status == status


def test_a_broken_parity_file_fails(tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text("{")
    record = ArtifactRecord(kind="quantisations", uri=str(tmp_path), sha256="0" * 64)
    assert quantised_parity(config_with(), {"quantize": record}).status == "fail"


def test_records_are_those_of_the_profiles_newest_run(tmp_path: Path) -> None:
    for name, profile, sha in (("1", "a", "1" * 64), ("2", "a", "2" * 64), ("3", "b", "3" * 64)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"profile": profile}))
        record = ArtifactRecord(kind="model", uri="x", sha256=sha)
        (folder / "records.json").write_text(json.dumps({"sft": record.model_dump()}))
    (tmp_path / "latest").symlink_to("3")
    assert newest_records(tmp_path, "a")["sft"].sha256 == "2" * 64
    assert newest_records(tmp_path, "c") == {}
    assert newest_records(tmp_path / "none", "a") == {}


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("ppo_clip", "ppo_clip clip [0.8, 1.28], dual clip 3.0"),
        ("cispo", "cispo clip [0, 5]"),
        ("gspo", "gspo clip [0.9997, 1.0004]"),
        ("icepop", "icepop band [0.5, 5]"),
        ("tis", "tis weights per token up to 2"),
    ],
)
def test_every_loss_shows_its_bounds_and_its_defaults_are_usual(kind: str, bounds: str) -> None:
    finding = row("KL and clipping", config_with(rl__loss__type=kind))
    assert finding.status == "pass", finding
    assert bounds in finding.looked_at
