"""Writes Qwen2, Qwen3 and Llama models from an HF folder as GGUF, one tensor in memory at a time.

Matrices are float16 (or float32), vectors and norms float32. The same folder gives the same bytes.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quantize.architecture import ModelShape, permute_rope, read_shape
from quantize.conversion_check import check_file
from quantize.errors import ModelConfigError
from quantize.files import replacing
from quantize.vocabulary import Vocabulary, load_tokenizer, read_vocabulary
from tasks.artifacts.content_hash import hash_file
from tasks.models.errors import NonFiniteWeightError

if TYPE_CHECKING:
    from gguf import GGUFWriter

FileType = Literal["f16", "f32"]
StoredType = Literal["F32", "F16", "BF16"]

_STORED: dict[StoredType, "np.dtype[Any]"] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
LARGEST_BF16 = 3.3895313892515355e38
"""(2 − 2⁻⁷) · 2¹²⁷; what is larger rounds to infinity."""

_FILE_TYPE = {"f32": 0, "f16": 1}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class ConversionReport:
    """What was written."""

    path: Path
    sha256: str
    size_bytes: int
    architecture: str
    tensors: int
    rows: int
    """Embedding rows, which is also the number of tokens in the file."""
    padded: int
    """Rows without a token, written as unused `[PADi]`."""
    pre_tokenizer: str
    eos_id: int
    kept_wide: tuple[str, ...]
    """Matrices that float16 cannot hold or cannot be multiplied in, as `name: BF16`."""
    texts_checked: int
    """Texts whose ids are the same in llama.cpp and in the HF tokenizer."""
    normaliser: str | None
    """What the device must do to text before the model sees it."""


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file: where it comes from and how it is laid out."""

    name: str
    load: Callable[[], np.ndarray]
    """float32, already permuted."""


def convert(
    model_dir: Path,
    out: Path,
    dtype: FileType = "f16",
    *,
    wide: frozenset[str] = frozenset(),
) -> ConversionReport:
    """Write `model_dir` as the GGUF file `out`, then open it in llama.cpp and compare.

    `wide` names tensors of the file whose inputs overflow float16 (llama.cpp multiplies in the type
    of the matrix): they are kept as bfloat16, like those whose own values do.

    Raises:
        UnsupportedArchitectureError, UnsupportedTokenizerError: what is supported is listed.
        ModelConfigError: a key is missing, or the tie flag lies.
        VocabularySizeError: a token without an embedding row.
        NonFiniteWeightError: NaN or infinity in a tensor.
        ConversionCheckError: the file does not load or tokenises otherwise; it is not kept.
        NonFiniteLogitsError: it loads and gives NaN or infinity; it is not kept.
    """
    model_dir, out = Path(model_dir), Path(out)
    shape = read_shape(model_dir)
    weights = _Safetensors(model_dir)
    rows = _embedding_rows(weights, shape)
    tokenizer = load_tokenizer(model_dir)
    vocabulary = read_vocabulary(tokenizer, rows, shape)
    tensors = _tensors(weights, shape)
    with replacing(out) as temporary:
        kept = _write(temporary, shape, vocabulary, tensors, dtype, wide)
        texts = check_file(temporary, tokenizer, vocabulary, shape.eos_ids)
    return ConversionReport(
        path=out,
        sha256=hash_file(out),
        size_bytes=out.stat().st_size,
        architecture=shape.architecture.gguf_name,
        tensors=len(tensors),
        rows=rows,
        padded=sum(token_type == 5 for token_type in vocabulary.types),
        pre_tokenizer=vocabulary.pre,
        eos_id=vocabulary.special_ids["eos"],
        kept_wide=kept,
        texts_checked=texts,
        normaliser=vocabulary.normaliser,
    )


class _Safetensors:
    """The tensors of an HF folder, read one at a time."""

    def __init__(self, model_dir: Path) -> None:
        index = model_dir / "model.safetensors.index.json"
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {name: model_dir / file for name, file in files.items()}
            return
        single = model_dir / "model.safetensors"
        if not single.is_file():
            raise ModelConfigError(
                f"{model_dir} holds neither model.safetensors nor its index; save the model with "
                "safe_serialization"
            )
        from safetensors import safe_open

        with safe_open(single, framework="pt") as file:
            self._files = dict.fromkeys(file.keys(), single)

    def names(self) -> list[str]:
        """Tensor names, buffers of old checkpoints left out."""
        return sorted(n for n in self._files if not n.endswith(_BUFFERS))

    def shape(self, name: str) -> list[int]:
        """Its shape, without reading it."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            return list(file.get_slice(name).get_shape())

    def load(self, name: str) -> np.ndarray:
        """Its values as float32.

        Raises:
            NonFiniteWeightError: NaN or infinity among them.
        """
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            values = file.get_tensor(name).float().numpy()
        bad = values.size - int(np.count_nonzero(np.isfinite(values)))
        if bad:
            raise NonFiniteWeightError(
                f"{name} holds {bad} values that are NaN or infinite; this model must not ship: "
                "go back to an earlier checkpoint"
            )
        return values


def _embedding_rows(weights: _Safetensors, shape: ModelShape) -> int:
    names = weights.names()
    if _EMBEDDING not in names:
        raise ModelConfigError(
            f"the weights hold no {_EMBEDDING}; is this a causal language model?"
        )
    rows = weights.shape(_EMBEDDING)[0]
    if rows != shape.vocab_size:
        raise ModelConfigError(
            f"config.json has vocab_size={shape.vocab_size} and {_EMBEDDING} {rows} rows; write "
            "the number of rows into config.json"
        )
    if not shape.tied and _HEAD not in names:
        raise ModelConfigError(
            f"config.json has tie_word_embeddings=false and the weights hold no {_HEAD}; set the "
            "flag to true if the head is the embedding"
        )
    both = shape.tied and _HEAD in names
    if both and not np.array_equal(weights.load(_HEAD), weights.load(_EMBEDDING)):
        raise ModelConfigError(
            f"config.json has tie_word_embeddings=true and the weights hold a {_HEAD} that "
            f"differs from {_EMBEDDING}; a reader would drop one of them: set the flag to false"
        )
    return rows


def _tensors(weights: _Safetensors, shape: ModelShape) -> list[_Tensor]:
    """The file's tensors: embedding, blocks in order, final norm, head."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    arch = next(a for a, n in MODEL_ARCH_NAMES.items() if n == shape.architecture.gguf_name)
    names = get_tensor_name_map(arch, shape.blocks)
    tensors, unknown = [], []
    for source in weights.names():
        if source == _HEAD and shape.tied:
            continue
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if target is None:
            unknown.append(source)
        else:
            tensors.append(_Tensor(target, _loader(weights, source, shape)))
    if unknown:
        raise ModelConfigError(
            f"{shape.architecture.gguf_name} has no place for {', '.join(unknown[:8])}; merge "
            "adapters into the weights first"
        )
    if shape.rope_factors is not None:
        factors = shape.rope_factors
        tensors.append(_Tensor("rope_freqs.weight", lambda: factors))
    return sorted(tensors, key=_order)


def _loader(weights: _Safetensors, source: str, shape: ModelShape) -> Callable[[], np.ndarray]:
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(source.split(".")[-2])
    if heads is None or not shape.architecture.interleaved_rope:
        return lambda: weights.load(source)
    return lambda: permute_rope(weights.load(source), heads)


def _order(tensor: _Tensor) -> tuple[int, int, str]:
    block = re.match(r"blk\.(\d+)\.", tensor.name)
    group = 1 if block else {"token_embd.weight": 0, "rope_freqs.weight": 0}.get(tensor.name, 2)
    return group, int(block.group(1)) if block else 0, tensor.name


def _write(
    path: Path,
    shape: ModelShape,
    vocabulary: Vocabulary,
    tensors: list[_Tensor],
    dtype: FileType,
    wide: frozenset[str],
) -> tuple[str, ...]:
    """Write the file in two passes over the weights; returns the matrices kept wide, with types."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, shape.architecture.gguf_name)
    try:
        _write_keys(writer, shape, vocabulary, dtype)
        kept = []
        types: dict[str, StoredType] = {}
        for tensor in tensors:
            values = tensor.load()
            kind = stored_type(tensor.name, values, dtype, wide)
            types[tensor.name] = kind
            if dtype == "f16" and kind != "F16" and is_matrix(tensor.name, values.ndim):
                kept.append(f"{tensor.name}: {kind}")
            stored = _STORED[kind]
            writer.add_tensor_info(
                tensor.name,
                values.shape,
                stored,
                values.size * stored.itemsize,
                raw_dtype=GGMLQuantizationType.BF16 if kind == "BF16" else None,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.load())
            kind = types[tensor.name]
            if kind == "BF16":
                writer.write_tensor_data(quantize(values, GGMLQuantizationType.BF16))
            else:
                writer.write_tensor_data(values.astype(_STORED[kind], copy=False))
    finally:
        writer.close()
    return tuple(kept)


def is_matrix(name: str, dimensions: int) -> bool:
    """Whether a tensor may be narrower than float32."""
    return dimensions > 1 and not name.endswith("_norm.weight")


def stored_type(
    name: str, values: np.ndarray, dtype: FileType, wide: frozenset[str] = frozenset()
) -> StoredType:
    """The type a tensor is written in: the narrowest of those asked for that holds its values."""
    if dtype == "f32" or not is_matrix(name, values.ndim):
        return "F32"
    largest = float(np.abs(values).max(initial=0))
    if largest > LARGEST_BF16:
        return "F32"
    with np.errstate(over="ignore"):
        overflows = bool(np.isinf(np.float16(largest)))
    return "BF16" if overflows or name in wide else "F16"


def _write_keys(
    writer: "GGUFWriter", shape: ModelShape, vocabulary: Vocabulary, dtype: FileType
) -> None:
    from gguf import GGML_QUANT_VERSION

    writer.add_type("model")
    for key, value in shape.kv.items():
        _add(writer, f"{shape.architecture.gguf_name}.{key}", value)
    writer.add_file_type(_FILE_TYPE[dtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for key, entry in _vocabulary_keys(vocabulary):
        _add(writer, f"tokenizer.{key}", entry)


def _vocabulary_keys(
    vocabulary: Vocabulary,
) -> Iterator[tuple[str, bool | int | float | str | list]]:
    yield "ggml.model", "gpt2"
    yield "ggml.pre", vocabulary.pre
    yield "ggml.tokens", list(vocabulary.tokens)
    yield "ggml.token_type", list(vocabulary.types)
    yield "ggml.merges", list(vocabulary.merges)
    longer = {"pad": "padding", "unk": "unknown"}
    for role, token_id in vocabulary.special_ids.items():
        yield f"ggml.{longer.get(role, role)}_token_id", token_id
    yield "ggml.add_bos_token", vocabulary.add_bos
    yield "ggml.add_eos_token", False
    if vocabulary.chat_template is not None:
        yield "chat_template", vocabulary.chat_template


def _add(writer: "GGUFWriter", key: str, value: bool | int | float | str | list) -> None:
    """Add a key with the GGUF type that readers expect for its Python type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
