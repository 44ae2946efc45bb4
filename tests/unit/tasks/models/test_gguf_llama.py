"""A GGUF's weights, configuration and tokenizer become Hugging Face's without a change."""

import json

import numpy as np
import pytest
import torch
from tiny_gguf import (
    CONTEXT,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    SPECIALS,
    STRESS,
    TEMPLATE,
    compare_with_llama_cpp,
    llama_cpp_ids,
    make,
    package,
    tiny_tokens,
    write_tiny_gguf,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.artifacts.content_hash import hash_tensors
from tasks.models.gguf_llama import GgufFile, GgufReadError, undo_rope_permutation

__all__ = ["package"]


def test_permutation_is_undone_by_hand():
    # One head of size 4: GGUF rows are Hugging Face rows 0, 2, 1, 3.
    assert undo_rope_permutation(np.array([[0], [2], [1], [3]]), 1).ravel().tolist() == [0, 1, 2, 3]
    # Two heads of size 6: 0 3 1 4 2 5 | 6 9 7 10 8 11.
    stored = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    assert undo_rope_permutation(stored, 2).tolist() == list(range(12))


def test_permutation_refuses_odd_heads():
    with pytest.raises(GgufReadError, match="6 rows do not divide into 2 heads"):
        undo_rope_permutation(np.zeros((6, 1)), 2)


def test_answers_equal_llama_cpp_on_the_same_file(package, tmp_path):
    make(tmp_path / "out")
    vocabulary = len(tiny_tokens()[0])
    sequences = [list(range(0, vocabulary, 3)), [5] * 40, [1]]

    kl, same = compare_with_llama_cpp(package / "tiny.gguf", tmp_path / "out", sequences)

    assert kl.max() < 1e-7
    assert same.all()


def test_untied_output_matrix_is_kept(package, tmp_path):
    write_tiny_gguf(package / "tiny.gguf", tied=False)
    make(tmp_path / "out")

    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    kl, _ = compare_with_llama_cpp(package / "tiny.gguf", tmp_path / "out", [list(range(9, 99))])
    assert kl.max() < 1e-7


def test_ids_equal_llama_cpp_on_stress_strings(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")

    ours = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in STRESS]

    assert ours == llama_cpp_ids(package / "tiny.gguf", STRESS)
    assert [tokenizer.decode(ids) for ids in ours] == STRESS


def test_digits_stay_single_whatever_the_merges_say(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("1234 hello") == ["1", "2", "3", "4", "Ġ", "hello"]


def test_a_byte_outside_the_vocabulary_becomes_unknown_not_nothing(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a\x04b", add_special_tokens=False)["input_ids"].count(0) == 1
    assert tokenizer.unk_token_id == 0


def test_special_tokens_and_template_come_along(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|endoftext|>", "<|endoftext|>")
    assert set(tokenizer.all_special_tokens) == set(SPECIALS)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == CONTEXT


@pytest.mark.parametrize(("add_bos", "expected"), [(False, 0), (True, 1)])
def test_a18_bos_is_added_only_where_the_file_says_so(package, tmp_path, add_bos, expected):
    write_tiny_gguf(package / "tiny.gguf", add_bos=add_bos)
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hello")["input_ids"].count(1) == expected
    assert tokenizer("hello", add_special_tokens=False)["input_ids"].count(1) == 0


def test_config_holds_the_files_own_values(package, tmp_path):
    make(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 12345.0, "rope_type": "default"}
    assert config["rms_norm_eps"] == 1e-3
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["intermediate_size"]) == (HIDDEN // HEADS, FFN)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config


def test_quantised_tensors_are_dequantised_row_for_row(package, tmp_path):
    write_tiny_gguf(package / "tiny.gguf", quantised=True)
    sha256 = make(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    state = model.state_dict()
    stored = GgufFile(package / "tiny.gguf").tensors()

    key = stored["blk.1.attn_k.weight"]
    half = HIDDEN // HEADS // 2
    for head in range(KV_HEADS):
        for i in range(half):
            row = 2 * half * head
            ours = state["model.layers.1.self_attn.k_proj.weight"]
            assert np.array_equal(ours[row + i], key[row + 2 * i])
            assert np.array_equal(ours[row + half + i], key[row + 2 * i + 1])
    down = state["model.layers.0.mlp.down_proj.weight"]
    assert np.array_equal(down, stored["blk.0.ffn_down.weight"])
    del state["lm_head.weight"]  # tied: not in the file
    assert sha256 == hash_tensors(state)
