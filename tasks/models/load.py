"""Load and save models in Hugging Face format, safetensors only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tasks.artifacts.content_hash import hash_tensors
from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.folder import replace_folder
from tasks.models.errors import (
    DamagedModelError,
    ModelError,
    UnknownArchitectureError,
    VocabularyError,
)
from tasks.models.weights_file import read_weights

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ANEW = "copy the folder again, or run the stage that wrote it again (`rl-pipeline run --force`)"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no model where the config points."""


def load_tokenizer(path: Path | str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, exactly as its tokenizer.json says.

    AutoTokenizer puts Qwen2's own class in its place wherever config.json says qwen2, and with it
    a normaliser, a pre-tokenizer and an added `<|endoftext|>` that the file may not have; so it is
    asked only for a public id, or a folder without tokenizer.json.

    Raises:
        DamagedModelError: a local folder without a tokenizer, or with a damaged one.
    """
    folder = Path(path)
    whole = folder / "tokenizer.json"
    if whole.is_file():
        _json_object(whole)
    elif folder.is_dir() and not any(map(Path.is_file, _older(folder))):
        # of a folder without any, AutoTokenizer makes up a tokenizer with one token
        raise DamagedModelError(f"{folder} holds no tokenizer.json; {_ANEW}")
    try:
        if whole.is_file():
            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        return AutoTokenizer.from_pretrained(str(path), revision=revision)
    except (ValueError, OSError) as error:
        if not folder.exists():
            raise  # a public id: what the hub says
        raise DamagedModelError(
            f"the tokenizer in {folder} does not load: {_first_line(error)}; {_ANEW}"
        ) from error


def load_model(
    path: Path | str, *, dtype: str = "float32", revision: str | None = None
) -> PreTrainedModel:
    """A causal language model in `dtype`, in eval mode.

    Raises:
        ModelNotFoundError: a local folder without config.json (never asked of the hub).
        UnknownArchitectureError: not one of `ARCHITECTURES`.
        DamagedModelError: a local folder's files are not whole, or not of one model.
    """
    folder = Path(path)
    if folder.exists() and not (folder / "config.json").exists():
        raise ModelNotFoundError(f"model.path={path!s} holds no config.json")
    if not folder.exists() and (str(path).startswith((".", "/")) or str(path).count("/") != 1):
        raise ModelNotFoundError(
            f"model.path={path!s} is no folder; give a folder in Hugging Face format or a public "
            "model id of the form owner/name"
        )
    if folder.exists():
        check_architecture(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(path), revision=revision, dtype=DTYPES[dtype], use_safetensors=True
        )
    except (SafetensorError, StrictDataclassError, RuntimeError, ValueError, OSError) as error:
        if not folder.exists():
            raise  # a public id: what the hub says
        raise DamagedModelError(
            f"{path} does not load: config.json and weights are not whole, or not of one model: "
            f"{_first_line(error)}; {_ANEW}"
        ) from error
    _check_loaded(model)
    return model.eval()


def check_architecture(folder: Path) -> str:
    """The architecture named in config.json, if it is one that trains and converts."""
    names = _json_object(folder / "config.json").get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"model architecture {names[0]!r} is not supported; choose a model of one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _check_loaded(model: PreTrainedModel) -> None:
    if type(model).__name__ not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"model architecture {type(model).__name__!r} is not supported; choose a model of one "
            f"of {', '.join(ARCHITECTURES)}"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows (A17).

    Raises:
        VocabularyError: names the tokens without a row.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= rows:
        return
    missing = [t for t, i in sorted(tokenizer.get_vocab().items(), key=lambda x: x[1]) if i >= rows]
    raise VocabularyError(
        f"the tokenizer has {len(tokenizer)} tokens and the embedding {rows} rows; without a row: "
        f"{', '.join(missing[:8])}. Remove them from the tokenizer or resize the embedding"
    )


def canonical_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's own tensors by name; a tied head is left out, so it is counted once."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """Write an HF folder at once (temporary folder, fsync, rename); returns the weights' hash.

    `tensors` replaces the model's own (merged weights); the config says tied exactly where they
    hold no head of their own.
    """
    weights = {
        k: v.detach().cpu().contiguous() for k, v in (tensors or canonical_tensors(model)).items()
    }
    with replace_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        model.config.save_pretrained(temporary)
        _stamp_config(temporary / "config.json", model, tied="lm_head.weight" not in weights)
        _save_weights(weights, temporary / "model.safetensors")
    return hash_tensors(weights)


def _save_weights(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(dict(weights), path, metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise ArtifactWriteError(
            f"could not write {path}: {error}; free some space, then run again", path
        ) from error


def _stamp_config(config: Path, model: PreTrainedModel, *, tied: bool) -> None:
    value = json.loads(config.read_text())
    value["architectures"] = [type(model).__name__]
    value["dtype"] = "float32"
    value["tie_word_embeddings"] = tied
    config.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def hash_model(folder: Path) -> str:
    """Hash of the canonical tensors of a saved model.

    Raises:
        WeightsMismatchError: its file is missing or not whole.
    """
    return hash_tensors(read_weights(folder / "model.safetensors", _ANEW))


def _older(folder: Path) -> list[Path]:
    """Where tokenizers lay before tokenizer.json."""
    return [folder / name for name in ("vocab.json", "vocab.txt", "tokenizer.model")]


def _json_object(path: Path) -> dict[str, Any]:
    """What a model's JSON file says.

    Raises:
        DamagedModelError: it is no JSON object.
    """
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedModelError(f"{path} is no JSON: {error}; {_ANEW}") from error
    if not isinstance(found, dict):
        raise DamagedModelError(f"{path} is no JSON object; {_ANEW}")
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
