"""Merges an adapter folder into its base folder: float32, cast once, truthful about tied heads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantize.errors import AdapterMergeError, Float16OverflowError
from tasks.artifacts.content_hash import hash_tensors
from tasks.artifacts.folder import replace_folder
from tasks.models.merge import EMBEDDING, HEAD, merged_tensors

if TYPE_CHECKING:
    import torch

WeightType = Literal["float32", "float16", "bfloat16"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def merge_adapter(
    base_dir: Path,
    adapter_dir: Path | None,
    out_dir: Path,
    dtype: WeightType = "float32",
) -> str:
    """Write base plus adapter as a plain HF folder; returns the hash of its canonical tensors.

    The tokenizer comes from the adapter's folder where there is one (a vocabulary extended in
    training), else from the base.

    Raises:
        AdapterMergeError: the adapter does not fit, or leaves new embedding rows without values.
        NonFiniteWeightError, Float16OverflowError: name the tensor; nothing is written.
    """
    import torch
    from transformers import AutoModelForCausalLM

    _require_file(base_dir, "config.json")
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(base_dir), dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    config = model.config
    if adapter_dir is not None:
        model = _with_adapter(model, adapter_dir)
    tensors = merged_tensors(model)
    cast = {name: cast_weight(name, tensor, dtype) for name, tensor in tensors.items()}
    config.tie_word_embeddings = HEAD not in cast
    config.vocab_size = cast[EMBEDDING].shape[0]
    config.architectures = [_architecture_of(model)]
    config.dtype = dtype
    tokenizer_dir = base_dir
    if adapter_dir is not None and (adapter_dir / "tokenizer.json").is_file():
        tokenizer_dir = adapter_dir
    _write_folder(out_dir, config, cast, tokenizer_dir, base_dir)
    return hash_tensors(cast)


def _architecture_of(model: Any) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__


def _require_file(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise AdapterMergeError(f"{folder} holds no {name}; nothing is fetched from a hub")


def _with_adapter(model: Any, adapter_dir: Path) -> Any:
    """`model` with the adapter on it; its embedding grown to the rows the adapter was trained with.

    New rows are NaN until the adapter fills them, so that a missing one cannot pass unseen.
    """
    from peft import PeftModel
    from safetensors import safe_open

    _require_file(adapter_dir, "adapter_config.json")
    _require_file(adapter_dir, "adapter_model.safetensors")
    with safe_open(adapter_dir / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    rows = model.get_input_embeddings().weight.shape[0]
    wanted = _trained_rows(shapes, adapter_dir)
    if wanted is not None and wanted < rows:
        raise AdapterMergeError(
            f"{adapter_dir} was trained with {wanted} embedding rows and the base has {rows}; "
            "this adapter belongs to another base"
        )
    if wanted is not None and wanted > rows:
        model.resize_token_embeddings(wanted, mean_resizing=False)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight.data[rows:] = float("nan")
    try:
        return PeftModel.from_pretrained(model, str(adapter_dir), local_files_only=True)
    except RuntimeError as error:  # peft raises it bare for tensors of other shapes
        raise AdapterMergeError(f"{adapter_dir} does not fit its base: {error}") from error


def _trained_rows(shapes: Mapping[str, tuple[int, ...]], adapter_dir: Path) -> int | None:
    """Embedding rows an adapter was trained with, as its tensors show; None if they do not."""
    rows = set()
    for name, shape in shapes.items():
        leaf = name.rpartition("base_model.model.")[2]
        side = "embed_tokens" in leaf or leaf.startswith("lm_head")
        if not side:
            continue
        if "lora_embedding_A" in leaf:
            rows.add(shape[-1])
        elif ("lora_B" in leaf and "lm_head" in leaf) or leaf.endswith(
            ("embed_tokens.weight", "lm_head.weight", "base_layer.weight")
        ):
            rows.add(shape[0])
    if len(rows) > 1:
        raise AdapterMergeError(
            f"{adapter_dir} holds embeddings and heads of {sorted(rows)} rows; they must agree"
        )
    return rows.pop() if rows else None


def cast_weight(name: str, tensor: "torch.Tensor", dtype: WeightType) -> "torch.Tensor":
    """`tensor` in `dtype`, rounded once.

    Raises:
        Float16OverflowError: a finite value became infinite.
    """
    import torch

    cast = tensor.to(getattr(torch, dtype)).contiguous()
    if not bool(cast.isfinite().all()):
        largest = float(tensor.abs().max())
        raise Float16OverflowError(
            f"{name} holds {largest:.6g}, which {dtype} cannot (float16 ends at 65504); write "
            "bfloat16 or float32"
        )
    return cast


def _write_folder(
    out_dir: Path,
    config: Any,
    tensors: "Mapping[str, torch.Tensor]",
    tokenizer_dir: Path,
    base_dir: Path,
) -> None:
    """Write an HF folder at once: a temporary one beside it, then a rename."""
    from safetensors.torch import save_file

    with replace_folder(out_dir) as temporary:
        config.save_pretrained(temporary)
        _keep_architecture(temporary / "config.json", config)
        save_file(dict(tensors), temporary / "model.safetensors", metadata={"format": "pt"})
        for source in _companions(tokenizer_dir, base_dir):
            shutil.copyfile(source, temporary / source.name)


def _keep_architecture(path: Path, config: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    value["architectures"] = config.architectures
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _companions(tokenizer_dir: Path, base_dir: Path) -> list[Path]:
    """Tokenizer files, chat template and generation settings that belong beside the weights."""
    names = (*_TOKENIZER_FILES, "chat_template.jinja", "special_tokens_map.json", "vocab.json")
    found = [tokenizer_dir / n for n in (*names, "merges.txt") if (tokenizer_dir / n).is_file()]
    generation = base_dir / "generation_config.json"
    return [*found, generation] if generation.is_file() else found
