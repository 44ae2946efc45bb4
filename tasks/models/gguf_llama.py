"""Reads a Llama-shaped GGUF file back into Hugging Face terms: config and float32 weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufReadError(ValueError):
    """A GGUF file is damaged, or holds something that has no Hugging Face counterpart here."""


class GgufFile:
    """An open GGUF file: `metadata` as plain values, tensors dequantised one at a time.

    Raises:
        GgufReadError: not a GGUF file, cut off, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = _open(path)
        self.metadata: dict[str, Any] = {
            key: field.contents() for key, field in self.reader.fields.items()
        }
        self.tensor_names = tuple(tensor.name for tensor in self.reader.tensors)

    def require(self, key: str) -> Any:
        """The value of `key`.

        Raises:
            GgufReadError: the file does not have it; no value is assumed in its place.
        """
        if key not in self.metadata:
            raise GgufReadError(
                f"{self.path.name} has no key {key!r}; convert the model again with a current tool"
            )
        return self.metadata[key]

    def tensors(self) -> dict[str, np.ndarray]:
        """Every tensor by its GGUF name, float32, in numpy order (rows first)."""
        from gguf.quants import dequantize

        result = {}
        for tensor in self.reader.tensors:
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise GgufReadError(
                    f"{self.path.name}: tensor {tensor.name} is {tensor.tensor_type.name}, which "
                    "cannot be dequantised; use an F16, Q8_0 or Q4_x file of the same model"
                ) from error
            result[tensor.name] = np.array(values, dtype=np.float32)  # off the mapped file
        return result


def _open(path: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise GgufReadError(
            f"{path} is not a readable GGUF file ({error}); install the package again"
        ) from error


def undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Llama q or k projection, from GGUF order back to Hugging Face order.

    GGUF interleaves the two halves that Hugging Face's RoPE rotates against each other: of a
    head of size d, GGUF row 2i is row i and GGUF row 2i+1 is row i + d/2.

    Args:
        weight: [heads * d, columns], or a bias [heads * d].
        heads: attention heads for q, key-value heads for k.
    """
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise GgufReadError(f"{rows} rows do not divide into {heads} heads of even size")
    pairs = weight.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def llama_config(gguf: GgufFile) -> "LlamaConfig":
    """The Hugging Face config that the file's metadata describes.

    Raises:
        GgufReadError: another architecture, scaled RoPE, or a missing key.
    """
    from transformers import LlamaConfig

    architecture = gguf.require("general.architecture")
    if architecture != "llama":
        raise GgufReadError(
            f"{gguf.path.name} has general.architecture={architecture!r}; only 'llama' files are "
            "read. For another model use model.type=pretrained with a Hugging Face folder"
        )
    scaling = gguf.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise GgufReadError(
            f"{gguf.path.name} has llama.rope.scaling.type={scaling!r}; only unscaled RoPE is read"
        )
    heads = int(gguf.require("llama.attention.head_count"))
    hidden = int(gguf.require("llama.embedding_length"))
    head_dim = int(gguf.metadata.get("llama.attention.key_length", hidden // heads))
    return LlamaConfig(
        vocab_size=len(gguf.require("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=int(gguf.require("llama.feed_forward_length")),
        num_hidden_layers=int(gguf.require("llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(gguf.metadata.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position_embeddings=int(gguf.require("llama.context_length")),
        rms_norm_eps=_shortest(gguf.require("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _shortest(gguf.require("llama.rope.freq_base")),
        },
        tie_word_embeddings="output.weight" not in gguf.tensor_names,
        bos_token_id=gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=gguf.require("tokenizer.ggml.eos_token_id"),
        pad_token_id=gguf.metadata.get("tokenizer.ggml.padding_token_id"),
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def llama_weights(gguf: GgufFile, config: "LlamaConfig") -> dict[str, np.ndarray]:
    """Every weight under its Hugging Face name, float32, RoPE permutation undone.

    Raises:
        GgufReadError: a tensor is missing, left over, or has the wrong shape.
    """
    names = {**_GLOBAL_NAMES}
    for block in range(config.num_hidden_layers):
        names |= {f"blk.{block}.{g}": f"model.layers.{block}.{h}" for g, h in _BLOCK_NAMES.items()}
    if config.tie_word_embeddings:
        del names["output.weight"]
    _check_names(gguf, names)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for gguf_name, values in gguf.tensors().items():
        part = gguf_name.split(".")[-2]
        if part in heads:
            values = undo_rope_permutation(values, heads[part])
        weights[names[gguf_name]] = values
    _check_shapes(gguf, weights, config)
    return weights


def _check_names(gguf: GgufFile, names: Mapping[str, str]) -> None:
    present = set(gguf.tensor_names)
    missing, unknown = sorted(set(names) - present), sorted(present - set(names))
    if missing or unknown:
        raise GgufReadError(
            f"{gguf.path.name} is not a plain Llama: missing tensors {missing[:5]}, tensors "
            f"without a counterpart {unknown[:5]}"
        )


def _check_shapes(gguf: GgufFile, weights: Mapping[str, np.ndarray], config: "LlamaConfig") -> None:
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        expected = LlamaForCausalLM(config).state_dict()
    for name, values in weights.items():
        if tuple(expected[name].shape) != values.shape:
            raise GgufReadError(
                f"{gguf.path.name}: {name} has shape {values.shape}, the metadata asks for "
                f"{tuple(expected[name].shape)}"
            )
