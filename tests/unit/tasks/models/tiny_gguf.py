"""A small Llama GGUF with no value at its default, in a package, and llama.cpp's own answers."""

from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tasks.models.gguf_package import materialise

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "3 4", "é", "e r", "Ġ Ġ"]
STRESS = [
    "hello world",
    "a\r\nb\r\n\r\nc\t",
    "12345 007 3.14 1,234",
    "naïve café e\u0301 don't I'll",
    "नमस्ते 日本語 مرحبا 😀👩‍👩‍👧‍👦",
    "x²+½ ٣٤٥ १२३",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  lead \u2028\u2029\x85\u00a0 trail  ",
    "#### 72",
    "",
]
"""Texts that tokenizers disagree over."""


def tiny_tokens() -> tuple[list[str], list[str]]:
    """Specials, every byte but 0x04, and the merged tokens; and the merges."""
    merges = [merge for merge in MERGES if " " in merge]
    letters = [char for byte, char in sorted(bytes_to_unicode().items()) if byte != 4]
    return [*SPECIALS, *letters, *(merge.replace(" ", "") for merge in merges)], merges


def tiny_tensors(vocabulary: int, tied: bool) -> dict[str, np.ndarray]:
    """Random weights in llama.cpp's own layout, large enough for RoPE to matter."""
    rng = np.random.default_rng(7)
    head = HIDDEN // HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 0.3, (rows, columns)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocabulary, HIDDEN)}
    for block in range(LAYERS):
        parts = {
            "attn_norm": 1 + rng.normal(0, 0.1, HIDDEN).astype(np.float32),
            "attn_q": matrix(HIDDEN, HIDDEN),
            "attn_k": matrix(KV_HEADS * head, HIDDEN),
            "attn_v": matrix(KV_HEADS * head, HIDDEN),
            "attn_output": matrix(HIDDEN, HIDDEN),
            "ffn_norm": 1 + rng.normal(0, 0.1, HIDDEN).astype(np.float32),
            "ffn_gate": matrix(FFN, HIDDEN),
            "ffn_up": matrix(FFN, HIDDEN),
            "ffn_down": matrix(HIDDEN, FFN),
        }
        tensors |= {f"blk.{block}.{part}.weight": value for part, value in parts.items()}
    tensors["output_norm.weight"] = 1 + rng.normal(0, 0.1, HIDDEN).astype(np.float32)
    if not tied:
        tensors["output.weight"] = matrix(vocabulary, HIDDEN)
    return tensors


def write_tiny_gguf(path: Path, tied: bool = True, quantised: bool = False, **changes) -> Path:
    """A Llama GGUF with no value at its default; `changes` override metadata by short name."""
    tokens, merges = tiny_tokens()
    value = {
        "architecture": "llama",
        "pre": "smollm",
        "eos": 2,
        "merges": merges,
        "types": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "rope_base": 12345.0,
        "extra_tensor": None,
        "add_bos": False,
        "scaling": None,
    } | changes
    writer = gguf.GGUFWriter(path, value["architecture"])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_vocab_size(len(tokens))
    if value["rope_base"] is not None:
        writer.add_rope_freq_base(value["rope_base"])
    if value["scaling"] is not None:
        writer.add_rope_scaling_type(value["scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(value["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(value["types"])
    writer.add_token_merges(value["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(value["eos"])
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(value["add_bos"])
    writer.add_chat_template(TEMPLATE)
    tensors = tiny_tensors(len(tokens), tied)
    if value["extra_tensor"]:
        tensors[value["extra_tensor"]] = np.ones(8, np.float32)
    for name, data in tensors.items():
        if quantised and data.ndim == 2:
            raw = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package whose import fails, holding `tiny.gguf`; its folder."""
    folder = tmp_path / "site" / "tiny_gguf_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    write_tiny_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def make(out_dir: Path) -> str:
    """Make the folder of the package's model; its hash."""
    return materialise("tiny_gguf_model", "tiny.gguf", out_dir)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis."""
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def compare_with_llama_cpp(file: Path, folder: Path, sequences: list[list[int]]):
    """Per-token KL(HF ‖ llama.cpp) in nats and whether the top tokens agree."""
    llama = llama_cpp.Llama(
        str(file),
        n_ctx=512,
        n_threads=1,
        logits_all=True,
        verbose=False,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kl, same = [], []
    for ids in sequences:
        llama.reset()
        llama.eval(ids)
        theirs = log_softmax(np.array(llama.scores[: len(ids)], dtype=np.float64))
        with torch.no_grad():
            ours = log_softmax(model(torch.tensor([ids])).logits[0].double().numpy())
        kl.append((np.exp(ours) * (ours - theirs)).sum(-1))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    llama.close()
    return np.concatenate(kl), np.concatenate(same)


def llama_cpp_ids(file: Path, texts: list[str]) -> list[list[int]]:
    """What llama.cpp's own tokenizer makes of texts."""
    llama = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    ids = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    llama.close()
    return ids
