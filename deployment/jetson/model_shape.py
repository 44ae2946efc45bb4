"""The numbers of a decoder that decide how large it is: read from a GGUF, a config.json, or named.

Only the architectures the pipeline converts are known (qwen2, qwen3, llama; dense, no experts).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment.jetson.errors import MissingInputError, UnknownModelError

ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")
HEADER_BYTES_PER_ROW = 39
"""Metadata of a vocabulary, per row: token text, its type, its merge. Qwen's files have 39."""
ARCHITECTURES = ("qwen2", "qwen3", "llama")
_HF_NAMES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
}


@dataclass(frozen=True)
class ModelShape:
    """What the plan needs to know of a model."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    key_length: int
    value_length: int
    hidden: int
    ffn: int
    vocabulary: int
    """Rows of the embedding."""
    trained_context: int
    tied: bool
    """The output matrix is the embedding."""
    header_bytes: int
    """Of a GGUF file: everything before its tensor table."""

    @property
    def queries(self) -> int:
        """Columns of the attention's output projection."""
        return self.heads * self.key_length


# architecture, layers, heads, kv heads, head length, hidden, ffn, vocabulary, context, tied
_KNOWN = {
    "smollm2-135m": ("llama", 30, 9, 3, 64, 576, 1536, 49152, 8192, True),
    "smollm2-360m": ("llama", 32, 15, 5, 64, 960, 2560, 49152, 8192, True),
    "qwen2.5-0.5b": ("qwen2", 24, 14, 2, 64, 896, 4864, 151936, 32768, True),
    "qwen2.5-1.5b": ("qwen2", 28, 12, 2, 128, 1536, 8960, 151936, 32768, True),
    "qwen2.5-3b": ("qwen2", 36, 16, 2, 128, 2048, 11008, 151936, 32768, True),
    "qwen2.5-7b": ("qwen2", 28, 28, 4, 128, 3584, 18944, 152064, 32768, False),
    "qwen3-0.6b": ("qwen3", 28, 16, 8, 128, 1024, 3072, 151936, 40960, True),
    "qwen3-1.7b": ("qwen3", 28, 16, 8, 128, 2048, 6144, 151936, 40960, True),
    "qwen3-4b": ("qwen3", 36, 32, 8, 128, 2560, 9728, 151936, 40960, True),
    "qwen3-8b": ("qwen3", 36, 32, 8, 128, 4096, 12288, 151936, 40960, False),
    "llama-3.2-1b": ("llama", 16, 32, 8, 64, 2048, 8192, 128256, 131072, True),
    "llama-3.2-3b": ("llama", 28, 24, 8, 128, 3072, 8192, 128256, 131072, True),
    "llama-3.1-8b": ("llama", 32, 32, 8, 128, 4096, 14336, 128256, 131072, False),
}
"""Shapes from the models' own config.json, so that a plan can be made before any download."""


def known_names() -> tuple[str, ...]:
    """Models a plan can be made for by name."""
    return tuple(sorted(_KNOWN))


def known_shape(name: str) -> ModelShape:
    """The shape of a model by its usual name, with or without the owner and `-Instruct`.

    Raises:
        UnknownModelError: not in the list; says what is.
    """
    key = name.rpartition("/")[2].lower().removesuffix("-instruct")
    if key not in _KNOWN:
        raise UnknownModelError(
            f"{name!r} is no file and no known model; name a bundle, a GGUF, a model folder, a "
            f"config.json, or one of {', '.join(known_names())}"
        )
    architecture, layers, heads, kv_heads, length, hidden, ffn, rows, context, tied = _KNOWN[key]
    return ModelShape(
        architecture=architecture,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        key_length=length,
        value_length=length,
        hidden=hidden,
        ffn=ffn,
        vocabulary=rows,
        trained_context=context,
        tied=tied,
        header_bytes=rows * HEADER_BYTES_PER_ROW,
    )


def shape_of(metadata: Mapping[str, object], **tensors: Any) -> ModelShape:
    """The shape in GGUF metadata; `tensors` are `vocabulary`, `tied` and `header_bytes`.

    Raises:
        MissingInputError: a key is missing or no whole number.
        UnknownModelError: an architecture this project does not convert.
    """

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise MissingInputError(
                f"GGUF key {architecture}.{key}={value!r}: expected a positive whole number; "
                "quantise again"
            )
        return value

    architecture = str(metadata.get("general.architecture", "?"))
    if architecture not in ARCHITECTURES:
        raise UnknownModelError(
            f"general.architecture={architecture!r}: a plan is made for {', '.join(ARCHITECTURES)}"
        )
    heads, hidden = number("attention.head_count"), number("embedding_length")
    return ModelShape(
        architecture=architecture,
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        key_length=number("attention.key_length", hidden // heads),
        value_length=number("attention.value_length", hidden // heads),
        hidden=hidden,
        ffn=number("feed_forward_length"),
        trained_context=number("context_length"),
        **tensors,
    )


def read_shape(gguf: Path) -> ModelShape:
    """The shape a GGUF file declares.

    Raises:
        MissingInputError: not a GGUF file, or a key is missing.
        UnknownModelError: an architecture this project does not convert.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
        fields = reader.fields
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        rows = int(tensors["token_embd.weight"].shape[1])
        header = min(int(t.field.offset) for t in reader.tensors)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise MissingInputError(f"cannot read {gguf} ({error!r}); quantise again") from error
    return shape_of(
        {key: field.contents() for key, field in fields.items() if key not in ARRAYS},
        vocabulary=rows,
        tied="output.weight" not in tensors,
        header_bytes=header,
    )


def _vocabulary_bytes(folder: Path, rows: int) -> int:
    """GGUF metadata that the tokenizer of an HF folder becomes; an estimate without one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return rows * HEADER_BYTES_PER_ROW
    model = json.loads(path.read_bytes())["model"]
    texts = [len(token.encode()) for token in model["vocab"]]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    unused = max(0, rows - len(texts))
    total = sum(texts) + unused * len("[PAD000000]") + rows * (8 + 4)
    total += sum(8 + len(merge.encode()) for merge in merges)
    template = folder / "chat_template.jinja"
    return total + (template.stat().st_size if template.is_file() else 0) + 1024


def read_config_shape(path: Path) -> ModelShape:
    """The shape in an HF `config.json`, or in the folder that holds one.

    Raises:
        MissingInputError: unreadable, or a key is missing.
        UnknownModelError: an architecture this project does not convert.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_bytes())
        name = (config.get("architectures") or ["?"])[0]
        if name not in _HF_NAMES:
            raise UnknownModelError(
                f"{path}: architectures={name!r}; a plan is made for {', '.join(_HF_NAMES)}"
            )
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        length = int(config.get("head_dim") or hidden // heads)
        rows = int(config["vocab_size"])
        return ModelShape(
            architecture=_HF_NAMES[name],
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            key_length=length,
            value_length=length,
            hidden=hidden,
            ffn=int(config["intermediate_size"]),
            vocabulary=rows,
            trained_context=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            header_bytes=_vocabulary_bytes(path.parent, rows),
        )
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise MissingInputError(f"cannot read a model's shape in {path}: {error!r}") from error
    except ValueError as error:
        if isinstance(error, UnknownModelError):
            raise
        raise MissingInputError(f"cannot read a model's shape in {path}: {error}") from error
