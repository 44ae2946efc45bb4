"""Runs whose outputs are small but whole: gates, parity, and a really signed bundle."""

from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from deployment.jetson.signing import sign, signing_key
from flows.promotion.releases import make_release
from tasks.artifacts import ArtifactRecord, hash_file, write_atomic, write_json, write_jsonl
from tasks.tracking.promotion_ledger import Release

STAGES = ("data", "sft", "rl", "evaluation", "quantize", "package")


def write_bundle(folder: Path, key_dir: Path, content: str, **manifest: Any) -> str:
    """A bundle of one 'model' file, signed with the key in `key_dir`; its manifest's sha256."""
    model = write_atomic(folder / "models" / "Q8_0.gguf", f"not a model: {content}")
    sha256, size = hash_file(model), model.stat().st_size
    body = {
        "format": 1,
        "name": "agent",
        "default": "Q8_0",
        "models": {"Q8_0": {"file": "models/Q8_0.gguf", "sha256": sha256, "size": size}},
        "serving": {"tools": [], "max_new_tokens": 8, "max_turns": 1},
        "prompt": {"system_prompt": None},
        "files": {"models/Q8_0.gguf": {"sha256": sha256, "size": size}},
        **manifest,
    }
    path = write_json(folder / "manifest.json", body)
    signature = sign(path.read_bytes(), signing_key(key_dir, {}).private)
    write_atomic(folder / "manifest.json.sig", signature)
    return hash_file(path)


def small_rows(count: int) -> list[dict[str, str]]:
    """Held-out rows `h0`, `h1`, …: what is i plus i?"""
    return [
        {"id": f"h{i}", "prompt": f"{i}+{i}=?", "answer": str(2 * i), "band": "easy"}
        for i in range(count)
    ]


def write_run(runs: Path, run_id: str, *, content: str = "", **config: Any) -> Release:
    """A finished run's folder and its stages' outputs; gates passed. Returns its release."""
    content = content or run_id
    store = runs / "store"
    settings = PipelineConfig.model_validate({"profile": "calc", **config})
    folders = {stage: store / stage / run_id for stage in STAGES}
    write_json(folders["data"] / "gate.json", {"passed": True, "reasons": []})
    write_jsonl(folders["data"] / "heldout.jsonl", small_rows(4))
    gate = {"passed": True, "reasons": [], "checks": []}
    write_json(folders["evaluation"] / "summary.json", {"gate": gate, "rl": {"accuracy": 0.75}})
    parity = {"quant": {"Q8_0": {"ships": True, "why": "good", "kld_mean": 0.001}}}
    write_json(folders["quantize"] / "parity.json", parity)
    write_json(folders["sft"] / "snapshot.json", content)
    write_json(folders["rl"] / "policy" / "tokenizer_config.json", {})
    bundle = folders["package"] / "bundle"
    sha256 = write_bundle(bundle, runs / "keys", content)
    records = {
        stage: ArtifactRecord(
            kind="bundle" if stage == "package" else "model",
            uri=str(folder),
            sha256=sha256 if stage == "package" else f"{len(stage):064x}",
            meta={"default": "Q8_0", "bundle": str(bundle)} if stage == "package" else {},
        )
        for stage, folder in folders.items()
    }
    plain = {stage: record.model_dump(mode="json") for stage, record in records.items()}
    write_json(runs / run_id / "records.json", plain)
    write_json(runs / run_id / "config.json", settings.model_dump(mode="json"))
    return make_release(settings.profile, run_id, records)
