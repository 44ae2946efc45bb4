"""Shapes of models, and what follows from them alone: parameters, adapter size, cache per token.

H hidden size, F feed-forward size, Q query width (heads × head size), K key width (key-value heads
× head size), L layers, V vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema.model import GgufPackageModel, Model, PretrainedModel, ScratchModel


class UnknownShapeError(LookupError):
    """A model that is neither on this disk nor among the published shapes."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers and grouped-query attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    head_norm: bool = False
    """Norms of queries and keys, one weight for each position of a head (Qwen3)."""

    @property
    def query_width(self) -> int:
        """Q."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """K, of keys and of values alike."""
        return self.kv_heads * self.head_size

    def projections(self) -> dict[str, tuple[int, int]]:
        """Input and output width of every projection of one layer, by name."""
        h, f, q, k = self.hidden, self.ffn, self.query_width, self.key_width
        return {
            "q_proj": (h, q), "k_proj": (h, k), "v_proj": (h, k), "o_proj": (q, h),
            "gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h),
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        """Every weight, a tied output layer once."""
        matrices = sum(a * b for a, b in self.projections().values())
        biases = (self.query_width + 2 * self.key_width) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_size if self.head_norm else 0)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (matrices + biases + norms) + embeddings + self.hidden

    def adapter_parameters(self, r: int, targets: Sequence[str]) -> int:
        """Weights of LoRA matrices of rank r: (in + out) · r for each target of each layer."""
        widths = self.projections()
        return self.layers * r * sum(sum(widths[t]) for t in targets if t in widths)

    def cache_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.key_width * element_bytes


def _qwen2(h: int, layers: int, heads: int, f: int, kv: int = 2, v: int = 151936) -> ModelShape:
    return ModelShape(h, layers, heads, kv, h // heads, f, v, tied=v == 151936, qkv_bias=True)


def _qwen3(h: int, layers: int, heads: int, f: int, *, tied: bool = True) -> ModelShape:
    return ModelShape(h, layers, heads, 8, 128, f, 151936, tied, head_norm=True)


PUBLISHED = {
    "Qwen2.5-0.5B": _qwen2(896, 24, 14, 4864),
    "Qwen2.5-1.5B": _qwen2(1536, 28, 12, 8960),
    "Qwen2.5-3B": _qwen2(2048, 36, 16, 11008),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 18944, kv=4, v=152064),
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
    "SmolLM2-135M": ModelShape(576, 30, 9, 3, 64, 1536, 49152, tied=True),
}
"""Numbers of the `config.json` each model was published with, by the model's name."""


def shape_of(model: Model) -> ModelShape:
    """The shape a run's model has.

    Raises:
        UnknownShapeError: it has to be read from a file that is not here.
    """
    if isinstance(model, ScratchModel):
        head_size = model.hidden_size // model.heads
        return ModelShape(
            model.hidden_size, model.layers, model.heads, model.kv_heads, head_size,
            model.ffn_size, model.vocab_size, tied=True, head_norm=True,
        )  # fmt: skip
    name = model.path if isinstance(model, PretrainedModel) else model.file
    config = Path(name) / "config.json"
    if isinstance(model, PretrainedModel) and config.is_file():
        return _read(config)
    known = [n for n in PUBLISHED if _is_called(Path(name).name, n)]
    if not known:
        where = "model.file" if isinstance(model, GgufPackageModel) else "model.path"
        raise UnknownShapeError(
            f"{where}={name}: the shape of this model is unknown; expected a folder with "
            f"config.json or one of {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[known[0]]


def _is_called(name: str, published: str) -> bool:
    """Whether a folder, id or file is of a published model: its name, or that and a suffix."""
    return name == published or name.startswith((f"{published}-", f"{published}."))


def _read(path: Path) -> ModelShape:
    try:
        body = json.loads(path.read_bytes())
        heads = body["num_attention_heads"]
        return ModelShape(
            hidden=body["hidden_size"],
            layers=body["num_hidden_layers"],
            heads=heads,
            kv_heads=body.get("num_key_value_heads", heads),
            head_size=body.get("head_dim") or body["hidden_size"] // heads,
            ffn=body["intermediate_size"],
            vocabulary=body["vocab_size"],
            tied=bool(body.get("tie_word_embeddings", False)),
            qkv_bias=body.get("model_type") == "qwen2",
            head_norm=body.get("model_type") == "qwen3",
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UnknownShapeError(f"{path} does not say the shape of a model: {error!r}") from error
