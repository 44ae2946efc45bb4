"""How many bytes a quantised GGUF file will have, tensor by tensor, before it is made.

Follows llama.cpp's mix of types (`src/llama-quant.cpp`) for the dense decoders this project
converts: which tensors get more bits, and what a row that the wanted type cannot hold becomes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.schema.quantize import QuantType
from deployment.jetson.model_shape import ModelShape

FileType = Literal["F16"] | QuantType
FILE_TYPES: tuple[FileType, ...] = ("F16", "Q8_0", "Q5_K_M", "Q4_K_M", "IQ2_M")
"""From the largest to the smallest."""
ALIGNMENT = 32
# type → (weights in a block, bytes of a block); as `gguf.GGML_QUANT_SIZES` has them
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q8_0": (32, 34),
    "Q6_K": (256, 210),
    "Q5_K": (256, 176),
    "Q5_1": (32, 24),
    "Q5_0": (32, 22),
    "Q4_K": (256, 144),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
}
_BASE = {"Q8_0": "Q8_0", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K", "IQ2_M": "IQ2_S"}
_FALLBACK = {"IQ2_S": "IQ4_NL", "IQ3_S": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What a row that is no multiple of 256 becomes; one that is no multiple of 32 becomes F16."""
_WIDE_GQA = 4


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: `rows` of `columns` weights."""

    name: str
    rows: int
    columns: int
    dimensions: int = 2


def tensors_of(shape: ModelShape) -> Iterator[Tensor]:
    """Every tensor of a model, layer by layer, as the converter writes them."""
    hidden, queries = shape.hidden, shape.queries
    keys, values = shape.kv_heads * shape.key_length, shape.kv_heads * shape.value_length
    yield Tensor("token_embd.weight", shape.vocabulary, hidden)
    yield Tensor("output_norm.weight", 1, hidden, 1)
    if not shape.tied:
        yield Tensor("output.weight", shape.vocabulary, hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield Tensor(f"{block}attn_norm.weight", 1, hidden, 1)
        yield Tensor(f"{block}ffn_norm.weight", 1, hidden, 1)
        yield Tensor(f"{block}attn_q.weight", queries, hidden)
        yield Tensor(f"{block}attn_k.weight", keys, hidden)
        yield Tensor(f"{block}attn_v.weight", values, hidden)
        yield Tensor(f"{block}attn_output.weight", hidden, queries)
        if shape.architecture == "qwen3":
            yield Tensor(f"{block}attn_q_norm.weight", 1, shape.key_length, 1)
            yield Tensor(f"{block}attn_k_norm.weight", 1, shape.key_length, 1)
        if shape.architecture == "qwen2":
            for name, width in (("q", queries), ("k", keys), ("v", values)):
                yield Tensor(f"{block}attn_{name}.bias", 1, width, 1)
        yield Tensor(f"{block}ffn_gate.weight", shape.ffn, hidden)
        yield Tensor(f"{block}ffn_up.weight", shape.ffn, hidden)
        yield Tensor(f"{block}ffn_down.weight", hidden, shape.ffn)


def _gets_more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third layer between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _is_head(tensor: Tensor, shape: ModelShape) -> bool:
    """The output matrix, or the embedding that stands for it."""
    return tensor.name == "output.weight" or (shape.tied and tensor.name == "token_embd.weight")


def _wanted(tensor: Tensor, shape: ModelShape, file_type: QuantType) -> str:
    """The type of the mix, before it is known whether the rows fit."""
    base = _BASE[file_type]
    if _is_head(tensor, shape):
        if tensor.columns % BLOCKS[base][0] or base == "Q8_0":
            return "Q8_0"
        return "Q5_K" if file_type == "IQ2_M" else "Q6_K"
    if tensor.name == "token_embd.weight":
        return "IQ3_S" if file_type == "IQ2_M" else base
    layer, part = int(tensor.name.split(".")[1]), tensor.name.split(".")[2]
    if file_type == "IQ2_M":
        if part == "attn_v":
            return "Q4_K" if shape.heads // shape.kv_heads >= _WIDE_GQA else "IQ3_S"
        first = part == "ffn_down" and layer < shape.layers // 8
        return "IQ3_S" if part == "attn_output" or first else base
    if file_type in ("Q4_K_M", "Q5_K_M") and part in ("attn_v", "ffn_down"):
        return "Q6_K" if _gets_more_bits(layer, shape.layers) else base
    return base


def tensor_type(tensor: Tensor, shape: ModelShape, file_type: FileType) -> str:
    """The type a tensor really gets."""
    if tensor.dimensions == 1:
        return "F32"
    if file_type == "F16":
        return "F16"
    wanted = _wanted(tensor, shape, file_type)
    if tensor.columns % BLOCKS[wanted][0]:
        wanted = _FALLBACK.get(wanted, wanted)
    return "F16" if tensor.columns % BLOCKS[wanted][0] else wanted


def tensor_bytes(tensor: Tensor, kind: str) -> int:
    """Bytes of a tensor's data as one type."""
    weights, size = BLOCKS[kind]
    return tensor.rows * (-(-tensor.columns // weights)) * size


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FileSize:
    """Bytes of a file, and of what of it is held in memory or read for every token."""

    file_bytes: int
    data_bytes: int
    """All tensors."""
    embedding_bytes: int
    """The embedding alone: one row of it is read for a token where it is not the output too."""
    bits_per_weight: float
    """Effective: of all tensors, fallbacks included."""


def predict_file(shape: ModelShape, file_type: FileType) -> FileSize:
    """Size of the file that quantising `shape` to `file_type` makes."""
    table = data = padded = weights = embedding = 0
    for tensor in tensors_of(shape):
        size = tensor_bytes(tensor, tensor_type(tensor, shape, file_type))
        table += 8 + len(tensor.name) + 4 + 8 * tensor.dimensions + 4 + 8
        data, padded = data + size, padded + _padded(size)
        weights += tensor.rows * tensor.columns
        if tensor.name == "token_embd.weight":
            embedding = size
    return FileSize(
        file_bytes=_padded(shape.header_bytes + table) + padded,
        data_bytes=data,
        embedding_bytes=embedding,
        bits_per_weight=8 * data / weights,
    )


def measured_file(path: Path) -> FileSize:
    """The same numbers of a file that exists, read from its tensor table."""
    from gguf import GGUFReader

    tensors = GGUFReader(path).tensors
    data = sum(int(t.n_bytes) for t in tensors)
    return FileSize(
        file_bytes=path.stat().st_size,
        data_bytes=data,
        embedding_bytes=next(int(t.n_bytes) for t in tensors if t.name == "token_embd.weight"),
        bits_per_weight=8 * data / sum(int(t.n_elements) for t in tensors),
    )
