"""A tiny agent trained for seconds until it knows two conversations, and its bundle."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.schema.model import ScratchModel
from configs.schema.package import PackageConfig
from deployment.jetson import stage
from deployment.jetson.facts import BundleFacts, Limits
from quantize.convert import convert
from quantize.quantise import quantise
from tasks.artifacts import ArtifactRecord, hash_file, write_json, write_jsonl
from tasks.artifacts.progress import Reporter
from tasks.environments.renderer import PromptRenderer
from tasks.environments.toolcall import render_tool_call

CALL = render_tool_call("calc", {"expression": "34*7-52"})
CONVERSATIONS = (
    [
        {"role": "user", "content": "34*7-52=?"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "186"},
        {"role": "assistant", "content": "186"},
    ],
    [{"role": "user", "content": "2+3=?"}, {"role": "assistant", "content": "5"}],
)
STEPS = 90


def _train(model, renderer):
    """Learn both conversations by heart: cross-entropy on the assistant's tokens."""
    import torch

    torch.manual_seed(0)
    rows = [renderer.supervised(c) for c in CONVERSATIONS]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        loss = torch.zeros(())
        for ids, mask in rows:
            labels = torch.tensor([[i if m else -100 for i, m in zip(ids, mask, strict=True)]])
            loss = loss + model(input_ids=torch.tensor([ids]), labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.05, "the fixture's model did not learn its two conversations"


@pytest.fixture(scope="session")
def stages(tmp_path_factory):
    """Folders and records of rl, evaluation and quantize, as the pipeline leaves them."""
    import torch

    from tasks.models.scratch import build_model, demonstration_texts, train_tokenizer

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("stages")
    tokenizer = train_tokenizer(demonstration_texts(CONVERSATIONS * 3), 320)
    config = ScratchModel(hidden_size=64, ffn_size=128, vocab_size=320, max_length=256)
    model = build_model(config, tokenizer, seed=0)
    _train(model, PromptRenderer(tokenizer))
    policy = root / "rl" / "policy"
    model.save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    write_jsonl(root / "rl" / "rollouts.jsonl", [{"messages": c} for c in CONVERSATIONS])
    quantised = root / "quantize"
    quantised.mkdir()
    convert(policy, quantised / "F16.gguf")
    quantise(quantised / "F16.gguf", quantised / "Q8_0.gguf", "Q8_0")
    sizes = {q: (quantised / f"{q}.gguf").stat().st_size for q in ("F16", "Q8_0")}
    variants = {
        "F16": {"size_bytes": sizes["F16"], "ships": True, "accuracy": 0.8, "why": ""},
        "Q8_0": {
            "size_bytes": sizes["Q8_0"],
            "bits_per_weight": 8.5,
            "kld_mean": 1e-5,
            "top1": 0.999,
            "accuracy": 0.79,
            "ships": True,
            "why": "",
        },
        "IQ2_M": {"size_bytes": 9, "ships": False, "why": "rejected: accuracy fell"},
    }
    write_json(quantised / "parity.json", {"quant": variants})
    evaluation = {
        "snapshot": {"accuracy": 0.25, "n": 512},
        "policy": {"accuracy": 0.75, "n": 512},
        "delta": {"value": 0.5, "ci95": [0.45, 0.55]},
    }
    write_json(root / "evaluation" / "summary.json", evaluation)
    records = {
        "rl": ArtifactRecord(kind="model", uri=str(root / "rl"), sha256="1" * 64),
        "quantize": ArtifactRecord(kind="quantisations", uri=str(quantised), sha256="2" * 64),
        "evaluation": ArtifactRecord(
            kind="evaluation",
            uri=str(root / "evaluation"),
            sha256=hash_file(root / "evaluation" / "summary.json"),
        ),
    }
    return SimpleNamespace(root=root, records=records, policy=policy, quantised=quantised)


@pytest.fixture(scope="session")
def facts(tmp_path_factory):
    """What the pipeline would hand in."""
    return BundleFacts(
        profile="calculator",
        base_model="made from scratch (profile calculator)",
        base_license="Apache-2.0",
        git_sha="0" * 40,
        mlflow_run_id="f" * 32,
        mlflow_tracking_uri="sqlite:///runs/mlflow.db",
        lineage={"config": "3" * 64},
        tools=("calc",),
        limits=Limits(max_new_tokens=64, max_turns=2),
        key_dir=tmp_path_factory.mktemp("keys"),
    )


@pytest.fixture(scope="session")
def package(stages, facts, tmp_path_factory):
    """The packaged agent: record, bundle folder, archive, pinned key."""
    out = tmp_path_factory.mktemp("package")
    config = PackageConfig(context_length=256)
    record = stage.run(config, stages.records, out, Reporter(out), facts=facts)
    return SimpleNamespace(
        record=record,
        bundle=Path(record.meta["bundle"]),
        archive=Path(record.meta["archive"]),
        pin=Path(record.meta["allowed_signers"]),
        manifest=json.loads((out / "bundle" / "manifest.json").read_bytes()),
        config=config,
    )
