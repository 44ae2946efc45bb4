"""What an HF config says about a model, as GGUF keys; and how its tensors are called and laid out.

Key names and meanings follow the GGUF specification (ggml docs/gguf.md).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantize.errors import ModelConfigError, UnsupportedArchitectureError


@dataclass(frozen=True)
class Architecture:
    """How one HF architecture is written."""

    gguf_name: str
    interleaved_rope: bool = False
    """llama.cpp rotates neighbouring pairs: q and k rows are reordered (HF rotates halves)."""
    frequency_factors: bool = False
    """llama.cpp reads `rope_freqs.weight` for it."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", interleaved_rope=True, frequency_factors=True),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3"),
}


@dataclass(frozen=True)
class ModelShape:
    """The numbers of one model. `kv` holds GGUF keys without the architecture's prefix."""

    architecture: Architecture
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    kv: dict[str, int | float | str]
    rope_factors: np.ndarray | None
    """float32 (head_dim / 2): divisors of the rotation frequencies, for Llama 3."""
    eos_ids: tuple[int, ...]
    """Every EOS id that config.json and generation_config.json name."""
    bos_id: int | None


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json of an HF folder.

    Raises:
        ModelConfigError: there is none, or it is not a JSON object.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelConfigError(f"{model_dir} holds no config.json; expected an HF model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} holds {type(config).__name__}; expected an object")
    return config


def read_shape(model_dir: Path) -> ModelShape:
    """Everything config.json says that a GGUF file must carry.

    Raises:
        UnsupportedArchitectureError: unknown model, or a feature llama.cpp would silently ignore.
        ModelConfigError: a key is missing; nothing is guessed.
    """
    config = read_config(model_dir)
    architecture = _architecture(config)
    _refuse_silent_differences(config, architecture)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", default=heads)
    head_dim = _integer(config, "head_dim", default=hidden // heads)
    blocks = _integer(config, "num_hidden_layers")
    rope = rope_parameters(config)
    kv: dict[str, int | float | str] = {
        "block_count": blocks,
        "context_length": _integer(config, "max_position_embeddings"),
        "embedding_length": hidden,
        "feed_forward_length": _integer(config, "intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": float(_required(config, "rms_norm_eps")),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        **_scaling_keys(rope),
    }
    if architecture.gguf_name == "llama":
        kv["vocab_size"] = _integer(config, "vocab_size")
        kv["rope.dimension_count"] = head_dim
    factors = None
    if rope["rope_type"] == "llama3":
        factors = llama3_factors(rope, head_dim)
        if not architecture.frequency_factors:
            raise UnsupportedArchitectureError(
                f"rope_type=llama3 with {architecture.gguf_name}: llama.cpp reads frequency "
                "factors only for llama"
            )
    return ModelShape(
        architecture=architecture,
        blocks=blocks,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        kv=kv,
        rope_factors=factors,
        eos_ids=_eos_ids(model_dir, config),
        bos_id=config.get("bos_token_id"),
    )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    names = config.get("architectures") or [f"none (model_type={config.get('model_type')!r})"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"architectures={names[0]!r} in config.json cannot be converted to GGUF; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[names[0]]


def _refuse_silent_differences(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Features that would load without a word and compute something else."""
    wrong = {
        "quantization_config": config.get("quantization_config") is not None,
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
        "attention_bias": architecture.gguf_name == "qwen3" and bool(config.get("attention_bias")),
    }
    for key, bad in wrong.items():
        if bad:
            raise UnsupportedArchitectureError(
                f"{key}={config.get(key)!r} in config.json: llama.cpp's "
                f"{architecture.gguf_name} does not compute this; turn it off (dequantise the "
                "weights, where it is quantization_config) or choose another model"
            )


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ModelConfigError(
            f"config.json has no {key}; a GGUF reader would silently take a default, so write the "
            "value the model was trained with"
        )
    return config[key]


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        value = _required(config, key)
    if not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"config.json has {key}={value!r}; expected a positive integer")
    return value


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation's settings from either schema, always with `rope_type` and `rope_theta`.

    transformers 5 writes `rope_parameters`; earlier ones `rope_theta` beside `rope_scaling`, whose
    type key was once called `type`.

    Raises:
        ModelConfigError: no `rope_theta` anywhere; a reader would silently take 10000.
    """
    rope = dict(config.get("rope_scaling") or {})
    rope |= config.get("rope_parameters") or {}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise ModelConfigError(
            f"config.json has rope_theta={theta!r}, neither in rope_parameters nor at the top; "
            "without it llama.cpp would take 10000; write the model's own value"
        )
    rope["rope_theta"] = theta
    original = config.get("original_max_position_embeddings")
    rope.setdefault("original_max_position_embeddings", original)
    return rope


def _scaling_keys(rope: Mapping[str, Any]) -> dict[str, int | float | str]:
    """GGUF keys of position scaling."""
    kind = rope["rope_type"]
    if kind in ("default", "llama3"):
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedArchitectureError(
            f"rope_type={kind!r} in config.json cannot be converted; supported: default, linear, "
            "yarn, llama3"
        )
    factor = float(_required(rope, "factor"))
    keys: dict[str, int | float | str] = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": factor,
    }
    if kind == "yarn":
        _refuse_yarn_variants(rope)
        original = _integer(rope, "original_max_position_embeddings")
        keys["rope.scaling.original_context_length"] = original
        attention = yarn_attention_factor(rope, factor)
        if not math.isclose(attention, _mscale(factor)):
            keys["rope.scaling.attn_factor"] = attention / _mscale(factor)
    return keys


def _refuse_yarn_variants(rope: Mapping[str, Any]) -> None:
    """Settings of YaRN that llama.cpp has constants for in these architectures."""
    fixed = {"beta_fast": 32, "beta_slow": 1, "extrapolation_factor": 1, "truncate": True}
    for key, value in fixed.items():
        if (rope.get(key) if rope.get(key) is not None else value) != value:
            raise UnsupportedArchitectureError(
                f"rope_parameters.{key}={rope[key]!r}: llama.cpp always takes {value} here, so the "
                "file would rotate otherwise than the model"
            )


def _mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's magnitude correction, 0.1 · weight · ln(factor) + 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """What HF multiplies cos and sin by.

    llama.cpp multiplies by `mscale(factor)` itself, so the file carries the quotient only.
    """
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
    return _mscale(factor)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Divisors of the rotation frequencies, float32 (head_dim / 2), Llama 3.1's rule.

    A wavelength under context / high_freq_factor stays; over context / low_freq_factor it is
    stretched by `factor`; between the two, the frequencies are interpolated.
    """
    factor = float(_required(rope, "factor"))
    low, high = (
        float(_required(rope, "low_freq_factor")),
        float(_required(rope, "high_freq_factor")),
    )
    context = float(_integer(rope, "original_max_position_embeddings"))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.float32(rope["rope_theta"]) ** exponents
    wavelengths = 2 * np.pi / frequencies.astype(np.float64)
    smooth = (context / wavelengths - low) / (high - low)
    between = 1.0 / ((1.0 - smooth) / factor + smooth)
    factors = np.where(wavelengths > context / low, factor, between)
    return np.where(wavelengths < context / high, 1.0, factors).astype(np.float32)


def _eos_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids in the order named, config.json first, without repeats."""
    found: list[int] = []
    path = model_dir / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found.extend(i for i in ids if isinstance(i, int))
    return tuple(dict.fromkeys(found))


def permute_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder q or k rows (or their bias) of every head from halves to neighbouring pairs."""
    rows = weight.shape[0]
    return (
        weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )
