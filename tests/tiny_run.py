"""A whole tiny run's ingredients: problems, tokenizer, model, snapshot and config, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from configs.schema import PipelineConfig
from configs.schema.model import ScratchModel
from tasks.artifacts import write_jsonl
from tasks.artifacts.record import ArtifactRecord
from tasks.environments.row import Demonstration, Row

TINY_MODEL = {
    "type": "scratch", "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_size": 32,
    "vocab_size": 320, "max_length": 128,
}  # fmt: skip
LORA = {"type": "lora", "r": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}


class TinyData(NamedTuple):
    """Rows and demonstrations, and the record of the data stage that wrote them."""

    rows: list[Row]
    demonstrations: list[Demonstration]
    record: ArtifactRecord


class TinySnapshot(NamedTuple):
    """A saved tiny model and the record of the SFT stage that owns it."""

    folder: Path
    sha256: str
    record: ArtifactRecord


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it; a block that names another `type` replaces the old one."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        keep = isinstance(old, dict) and isinstance(value, dict)
        if keep and value.get("type", old.get("type")) == old.get("type"):
            value = merged(old, value)
        result[key] = value
    return result


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., PipelineConfig]:
    """Build a config of a run of seconds: `tiny_config(rl={"steps": 3})`."""
    base = {
        "model": TINY_MODEL,
        "sft": {"steps": 30, "batch_size": 16, "optimiser": {"lr": 1e-2, "warmup_steps": 2}},
        "rl": {
            "steps": 4,
            "batch_size": 8,
            "group_size": 4,
            "staleness_limit": 0,
            "runtime": {"type": "inline"},
            "trainable": LORA,
            "optimiser": {"lr": 1e-3, "warmup_steps": 0},
            "kl": {"coefficient": 0.01},
            "deepspeed": {"threads": 1},
            "sampling": {"max_new_tokens": 12, "max_turns": 2},
        },
    }

    def build(**changes: Any) -> PipelineConfig:
        return PipelineConfig.model_validate(merged(base, changes))

    return build


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> TinyData:
    """50 one-digit problems and 100 demonstrations, as the data stage leaves them."""
    from tasks.environments.calculator_problems import calculator_demonstrations, problem

    digits = range(1, 6)
    rows = [problem(f"{a}{op}{b}", "easy") for op in "+-" for a in digits for b in digits]
    demonstrations = calculator_demonstrations(rows, 100, tool_share=0.3, seed=5)
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "train.jsonl", (r.model_dump(mode="json") for r in rows))
    write_jsonl(
        folder / "demonstrations.jsonl", (d.model_dump(mode="json") for d in demonstrations)
    )
    record = ArtifactRecord(kind="dataset", uri=folder.as_posix(), sha256="d" * 64)
    return TinyData(rows, demonstrations, record)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_data):
    """The byte-level BPE of the demonstrations."""
    from tasks.models.scratch import demonstration_texts, train_tokenizer

    texts = demonstration_texts(d.messages for d in tiny_data.demonstrations)
    return train_tokenizer(texts, TINY_MODEL["vocab_size"])


@pytest.fixture(scope="session")
def tiny_renderer(tiny_tokenizer):
    """The one prompt renderer over it."""
    from tasks.environments.renderer import PromptRenderer

    return PromptRenderer(tiny_tokenizer)


@pytest.fixture
def tiny_model(tiny_tokenizer):
    """Build a fresh tiny Qwen3; the same seed gives the same weights."""
    import torch

    from tasks.models.scratch import build_model

    def build(seed: int = 1, spread: float = 8.0):
        model = build_model(ScratchModel.model_validate(TINY_MODEL), tiny_tokenizer, seed)
        with torch.no_grad():  # initial logits are nearly flat: spread them, so that tests see much
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(spread)
        return model.eval()

    return build


@pytest.fixture(scope="session")
def tiny_snapshot(tiny_data, tiny_config, tmp_path_factory) -> TinySnapshot:
    """What the SFT stage makes of the tiny data: poor, and not hopeless."""
    from tasks.artifacts.progress import Reporter
    from tasks.sft.stage import run

    out = tmp_path_factory.mktemp("sft")
    config = tiny_config(sft={"steps": 140})
    record = run(config, {"data": tiny_data.record}, out, Reporter(out))
    return TinySnapshot(out / "snapshot", record.sha256, record)
