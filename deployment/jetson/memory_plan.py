"""How much of the device's unified memory one model needs, from the GGUF's own numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from deployment.jetson.errors import MissingInputError
from deployment.jetson.on_device.llama_child import N_UBATCH

KV_BYTES = 2
"""llama.cpp keeps keys and values as float16."""
CUDA_CONTEXT_BYTES = 3 * 2**30 // 10
"""An estimate, 0.3 GiB; to be replaced by a measurement on the device."""
SERVER_BYTES = 160 * 2**20
"""Python processes: the model server and the agent."""
MARGIN_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ModelShape:
    """What the plan needs to know of a model."""

    layers: int
    kv_heads: int
    key_length: int
    value_length: int
    hidden: int
    vocabulary: int
    trained_context: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use; `total_bytes` is compared with MemAvailable."""

    weights_bytes: int
    kv_cache_bytes: int
    compute_bytes: int
    cuda_context_bytes: int
    server_bytes: int
    margin_bytes: int
    total_bytes: int

    def as_json(self) -> dict[str, int]:
        """For the manifest."""
        return asdict(self)


def read_shape(gguf: Path) -> ModelShape:
    """The shape a GGUF file declares.

    Raises:
        MissingInputError: not a GGUF file, or a key is missing.
    """
    from gguf import GGUFReader

    try:
        fields = GGUFReader(gguf).fields
        tokens = len(fields["tokenizer.ggml.tokens"].data)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise MissingInputError(f"cannot read {gguf} ({error!r}); quantise again") from error
    arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")
    return shape_of({k: f.contents() for k, f in fields.items() if k not in arrays}, tokens)


def shape_of(metadata: Mapping[str, object], vocabulary: int) -> ModelShape:
    """The shape in GGUF metadata.

    Raises:
        MissingInputError: a key is missing or no whole number.
    """

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int):
            raise MissingInputError(f"GGUF key {architecture}.{key}={value!r}: expected a number")
        return value

    architecture = metadata.get("general.architecture", "?")
    heads, hidden = number("attention.head_count"), number("embedding_length")
    return ModelShape(
        layers=number("block_count"),
        kv_heads=number("attention.head_count_kv", heads),
        key_length=number("attention.key_length", hidden // heads),
        value_length=number("attention.value_length", hidden // heads),
        hidden=hidden,
        vocabulary=vocabulary,
        trained_context=number("context_length"),
    )


def plan_memory(shape: ModelShape, weights_bytes: int, context: int) -> MemoryPlan:
    """W + KV + C + CUDA + server + margin.

    KV = layers · kv_heads · (d_k + d_v) · 2 B · context;
    C = n_ubatch · (vocabulary + hidden) · 4 B.
    """
    per_token = shape.layers * shape.kv_heads * (shape.key_length + shape.value_length) * KV_BYTES
    compute = min(N_UBATCH, context) * (shape.vocabulary + shape.hidden) * 4
    parts = (weights_bytes, per_token * context, compute)
    parts += (CUDA_CONTEXT_BYTES, SERVER_BYTES, MARGIN_BYTES)
    return MemoryPlan(*parts, total_bytes=sum(parts))
