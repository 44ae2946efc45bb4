"""Rows of the pre-flight table that look at models, tokenizers and what a run left behind."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import PipelineConfig
from configs.schema.model import PretrainedModel, ScratchModel
from flows.doctor.checklist_prompts import changed_files
from flows.doctor.findings import Finding
from tasks.artifacts import ArtifactRecord
from tasks.artifacts.provenance import project_root

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Records = Mapping[str, ArtifactRecord]
Message = dict[str, str]
_TEMPLATE_CALL = re.compile(r"\bapply_chat_template\b\s*\(|[\"']apply_chat_template[\"']")
_RENDERER = "tasks/environments/renderer.py"
_COMPARE_ONLY = frozenset({"quantize/conversion_check.py", "quantize/vocabulary.py"})
"""Hold a converted file against the template itself; no prompt is made of what they render."""


def golden_conversation(tools: Sequence[str]) -> list[Message]:
    """A short conversation of the kind the agent has, with a tool call where it has tools."""
    from tasks.environments.toolcall import render_tool_call

    question = {"role": "user", "content": "34*7-52=?"}
    answer = {"role": "assistant", "content": "186"}
    if not tools:
        return [question, answer]
    call = render_tool_call("calc", {"expression": "34*7-52"})
    return [
        question,
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "186"},
        answer,
    ]


def other_renderers(root: Path) -> list[str]:
    """Files that render a chat template without the one renderer."""
    found = []
    for folder in ("tasks", "deployment", "flows", "quantize", "configs"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name not in {_RENDERER, *_COMPARE_ONLY} and _TEMPLATE_CALL.search(
                path.read_text(encoding="utf-8")
            ):
                found.append(name)
    return found


def golden_render(config: PipelineConfig, records: Records) -> Finding:
    """SFT, RL and evaluation must give a conversation the same token ids."""
    name = "prompt format same as SFT"
    if others := other_renderers(project_root()):
        return Finding(
            name,
            "fail",
            f"chat templates are also rendered in {', '.join(others)}",
            f"render through {_RENDERER} only",
        )
    tokenizers = _tokenizers(config, records)
    if not tokenizers:
        return Finding(
            name,
            "open",
            f"every prompt goes through {_RENDERER}; its tokenizer comes with the first run",
            "check again after the SFT stage: token ids are compared then",
        )
    for stage, folder in (("sft", "snapshot"), ("rl", "policy")):
        changed = changed_files(records[stage], folder) if stage in records else []
        if changed:
            return Finding(
                name,
                "fail",
                f"not as stage {stage} left it: {', '.join(changed[:3])}",
                f"rl-pipeline run --force {stage}",
            )
    templates = {getattr(tok, "chat_template", None) for tok in tokenizers.values()}
    if len(templates) > 1:
        return Finding(
            name,
            "fail",
            f"{' and '.join(tokenizers)} have different chat templates",
            "start RL from this snapshot's own tokenizer: rl-pipeline run --force rl",
        )
    rendered = {where: _render(tok, config) for where, tok in tokenizers.items()}
    ids = {tuple(spans) for spans, _ in rendered.values()}
    if len(ids) > 1:
        return Finding(
            name,
            "fail",
            f"{' and '.join(rendered)} give a golden conversation different token ids",
            "start RL from this snapshot's own tokenizer: rl-pipeline run --force rl",
        )
    spans, whole = next(iter(rendered.values()))
    looked_at = (
        f"golden conversation, {len(spans)} tokens with {' and '.join(rendered)}: same ids turn by "
        "turn and as a whole"
    )
    if spans != whole[: len(spans)]:
        return Finding(
            name,
            "warn",
            looked_at.replace("same ids", "other ids"),
            "tokens merge across turns in this tokenizer: on a device, send token ids "
            "turn by turn as the bundle's tool loop does",
        )
    return Finding(name, "pass", looked_at)


def _render(
    tokenizer: "PreTrainedTokenizerBase", config: PipelineConfig
) -> tuple[list[int], list[int]]:
    """Ids as SFT and RL see them, span by span; and those of the whole text at once."""
    from tasks.environments.renderer import PromptRenderer

    renderer = PromptRenderer(tokenizer, config.system_prompt)
    conversation = golden_conversation(config.tools)
    whole = renderer.encode(renderer.text(conversation, open_turn=False))
    return renderer.supervised(conversation)[0], whole


def _tokenizers(config: PipelineConfig, records: Records) -> dict[str, "PreTrainedTokenizerBase"]:
    """The tokenizers there are, by where they come from."""
    folders = {"snapshot": ("sft", "snapshot"), "policy": ("rl", "policy")}
    paths = {
        where: records[stage].path / folder
        for where, (stage, folder) in folders.items()
        if stage in records and (records[stage].path / folder / "tokenizer_config.json").exists()
    }
    if not paths and isinstance(config.model, PretrainedModel) and Path(config.model.path).is_dir():
        paths = {"base model": Path(config.model.path)}
    if paths:
        from tasks.models.load import load_tokenizer

        return {where: load_tokenizer(path) for where, path in paths.items()}
    if isinstance(config.model, ScratchModel):
        from tasks.models.scratch import demonstration_texts, train_tokenizer

        texts = demonstration_texts([golden_conversation(config.tools)])
        return {"a tokenizer made from it": train_tokenizer(texts, config.model.vocab_size)}
    return {}


def weights_sha256(folder: Path) -> str:
    """Content hash of the weights in a model folder, taken anew."""
    from safetensors import safe_open

    from tasks.artifacts import hash_tensors

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as weights:
            tensors |= {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    return hash_tensors(tensors)


def reference_is_snapshot(config: PipelineConfig, records: Records) -> Finding:
    """The frozen SFT weights on disk are the ones the record names, and RL's reference."""
    name = "reference identical to SFT model"
    if "sft" not in records:
        return Finding(
            name,
            "open",
            "no run yet; RL refuses a snapshot whose hash differs",
            "check again after the SFT stage: the weights are hashed then",
        )
    snapshot = records["sft"].path / "snapshot"
    if not snapshot.is_dir():
        return Finding(name, "fail", f"{snapshot} is gone", "rl-pipeline run --force sft")
    found, expected = weights_sha256(snapshot), records["sft"].sha256
    if found != expected:
        return Finding(
            name,
            "fail",
            f"weights hash to {found[:12]}, the record says {expected[:12]}",
            "the snapshot was changed: rl-pipeline run --force sft",
        )
    if changed := changed_files(records["sft"], "snapshot"):
        return Finding(
            name,
            "fail",
            f"not as SFT left it: {', '.join(changed[:3])}",
            "the snapshot was changed: rl-pipeline run --force sft",
        )
    looked_at = f"snapshot {found[:12]} as recorded"
    if "rl" not in records:
        return Finding(name, "pass", f"{looked_at}; RL has not run")
    used = _reference_of(records["rl"])
    if used is None:
        return Finding(
            name,
            "warn",
            f"{looked_at}; RL left no trace of its reference",
            "rl-pipeline run --force rl",
        )
    if used != expected:
        return Finding(
            name,
            "fail",
            f"{looked_at}; RL measured KL to {str(used)[:12]}",
            "rl-pipeline run --force rl",
        )
    return Finding(name, "pass", f"{looked_at}; RL measured KL to the same")


def _reference_of(rl: ArtifactRecord) -> str | None:
    """The snapshot RL says it started from: in its record, else in its newest checkpoint."""
    if named := rl.meta.get("reference_sha256"):
        return str(named)
    for manifest in sorted(rl.path.glob("checkpoints/step-*/manifest.json"), reverse=True):
        try:
            return str(json.loads(manifest.read_bytes())["identity"]["snapshot"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def quantised_parity(config: PipelineConfig, records: Records) -> Finding:
    """What parity said of each quantisation in the newest run."""
    name = "quantisation parity"
    if "quantize" not in records:
        return Finding(
            name,
            "open",
            "no run yet; gates: "
            + ", ".join(
                f"{t} accuracy above {config.quantize.gates[t].accuracy_ci_low:+.0%}"
                for t in config.quantize.types
                if t in config.quantize.gates
            ),
            "check again after the run: each verdict is shown then",
        )
    path = records["quantize"].path / "parity.json"
    try:
        variants = json.loads(path.read_bytes())["quant"]
    except (OSError, ValueError, KeyError) as error:
        return Finding(name, "fail", f"{path}: {error}", "rl-pipeline run --force quantize")
    said = {kind: facts.get("ships") is True for kind, facts in variants.items()}
    looked_at = ", ".join(f"{kind} {'ships' if ok else 'rejected'}" for kind, ok in said.items())
    absent = [kind for kind in config.quantize.types if kind not in said]
    shipping = [kind for kind, ok in said.items() if ok and kind != "F16"]
    if shipping and absent:
        return Finding(
            name,
            "warn",
            f"{looked_at}; {', '.join(absent)} was not made in the newest run",
            "check again after the next run, which makes it",
        )
    if shipping:
        return Finding(name, "pass", looked_at)
    return Finding(
        name, "fail", looked_at, "no quantisation ships: add a larger one, quantize.types=[Q8_0]"
    )
