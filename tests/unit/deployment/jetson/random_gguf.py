"""Random GGUF files of a shape, written tensor by tensor; small, with the ratios of real models."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from deployment.jetson.file_size import tensors_of
from deployment.jetson.model_shape import ModelShape

SHAPES = {
    # architecture, layers, heads, kv heads, head length, hidden, ffn, vocabulary, context, tied
    "qwen3 tied, heads wider than hidden": ("qwen3", 8, 8, 4, 64, 256, 256, 1200, 2048, True),
    "qwen2 untied, GQA 7, rows off 256": ("qwen2", 3, 7, 1, 32, 224, 608, 1000, 1024, False),
    "llama tied, GQA 3, rows off 256": ("llama", 3, 9, 3, 32, 288, 512, 800, 1024, True),
    "llama untied, every head its own": ("llama", 3, 4, 4, 64, 256, 704, 1024, 1024, False),
    "qwen3 untied, GQA 4, many layers": ("qwen3", 16, 4, 1, 32, 256, 256, 512, 512, False),
    "qwen2 tied, nearly all vocabulary": ("qwen2", 1, 4, 2, 64, 256, 256, 12000, 4096, True),
    "llama tied, rows off 32": ("llama", 2, 5, 5, 16, 80, 200, 1500, 512, True),
}


def shape(name: str, header_bytes: int = 0) -> ModelShape:
    """One of `SHAPES`."""
    architecture, layers, heads, kv, length, hidden, ffn, rows, context, tied = SHAPES[name]
    return ModelShape(
        architecture, layers, heads, kv, length, length, hidden, ffn, rows, context, tied,
        header_bytes,
    )  # fmt: skip


def write_gguf(path: Path, of: ModelShape, seed: int = 0) -> Path:
    """An F16 file with normal weights, a vocabulary of dummy tokens, and every key llama.cpp reads.

    The tensor names and sizes are `tensors_of`'s: if one were missing, llama.cpp would not load it.
    """
    writer, arch = GGUFWriter(path, of.architecture), of.architecture
    for key, value in (
        ("block_count", of.layers),
        ("context_length", of.trained_context),
        ("embedding_length", of.hidden),
        ("feed_forward_length", of.ffn),
        ("attention.head_count", of.heads),
        ("attention.head_count_kv", of.kv_heads),
        ("attention.key_length", of.key_length),
        ("attention.value_length", of.value_length),
    ):
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 5000.0)
    if arch == "llama":
        writer.add_uint32("llama.rope.dimension_count", of.key_length)
        writer.add_uint32("llama.vocab_size", of.vocabulary)
    writer.add_file_type(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<t{i}>" for i in range(of.vocabulary)])
    writer.add_token_types([1] * of.vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(seed)
    for tensor in tensors_of(of):
        size = tensor.columns if tensor.dimensions == 1 else (tensor.rows, tensor.columns)
        kind = np.float32 if tensor.dimensions == 1 else np.float16
        writer.add_tensor(tensor.name, (0.02 * random.standard_normal(size)).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
