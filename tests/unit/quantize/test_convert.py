"""HF folders and the GGUF files written from them say the same thing."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tiny_models import CLASSES, hf_logits, kl, make_model, make_tokenizer, save
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoModelForCausalLM

from quantize.convert import convert, stored_type
from quantize.errors import (
    ConversionCheckError,
    ModelConfigError,
    UnsupportedArchitectureError,
    VocabularySizeError,
)
from tasks.models.errors import NonFiniteWeightError
from tasks.sampling.llama_cpp_context import LlamaCppContext

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "qwen2, biases, untied": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, 12 heads of 64, one kv head": (
        "qwen2",
        {"num_attention_heads": 4, "num_key_value_heads": 1},
    ),
    "qwen3, head_dim 32": ("qwen3", {}),
    "qwen3, head_dim 128, tied": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "llama, head_dim 32": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, theta 123456": ("llama", {"theta": 123456.0}),
    "llama, linear": ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama, llama3": ("llama", {"rope": LLAMA3}),
    "qwen2, yarn": ("qwen2", {"rope": YARN}),
    "qwen2, yarn attention factor": ("qwen2", {"rope": {**YARN, "attention_factor": 1.7}}),
    "qwen3, yarn mscale": ("qwen3", {"rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}}),
    "small rows": ("qwen2", {"hidden_size": 96, "intermediate_size": 160}),
}


def fields(path):
    reader = GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}


def llama_logits(path, ids):
    with LlamaCppContext(path, parallel_sequences=1, n_ctx_per_seq=256) as context:
        return next(context.logits_of([ids]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_hf(variant, tmp_path, tokenizer, ids):
    arch, settings = VARIANTS[variant]
    model = make_model(arch, **settings)
    expected = hf_logits(model, ids)
    folder = save(model, tokenizer, tmp_path / "hf")
    wide = convert(folder, tmp_path / "F32.gguf", "f32")
    half = convert(folder, tmp_path / "F16.gguf")
    assert kl(expected, llama_logits(wide.path, ids)) < 1e-10
    got = llama_logits(half.path, ids)
    assert kl(expected, got) < 1e-5
    assert (expected.argmax(-1) == got.argmax(-1)).mean() > 0.95
    assert half.architecture == arch and half.kept_wide == ()


def test_keys_are_the_configs(folders, tmp_path):
    report = convert(folders["llama"], tmp_path / "x.gguf")
    keys = fields(report.path)
    assert keys["llama.rope.freq_base"] == 5000.0
    assert keys["llama.attention.key_length"] == keys["llama.rope.dimension_count"] == 32
    assert keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(3e-6)
    assert keys["llama.context_length"] == 512
    assert keys["tokenizer.ggml.pre"] == "qwen2"
    assert len(keys["tokenizer.ggml.tokens"]) == report.rows == 448
    assert keys["tokenizer.ggml.eos_token_id"] == report.eos_id == 2
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["tokenizer.chat_template"].startswith("{% for m in messages")


def test_types_are_half_for_matrices_and_float_for_the_rest(folders, tmp_path):
    report = convert(folders["qwen2"], tmp_path / "x.gguf")
    types = {t.name: t.tensor_type.name for t in GGUFReader(report.path).tensors}
    assert len(types) == report.tensors == 3 + 2 * 12
    assert types["blk.0.attn_q.weight"] == types["output.weight"] == "F16"
    assert types["blk.1.attn_q.bias"] == types["output_norm.weight"] == "F32"


def test_the_same_folder_gives_the_same_bytes_wherever_it_lies(folders, tmp_path):
    first = convert(folders["qwen3"], tmp_path / "a.gguf")
    shutil.copytree(folders["qwen3"], tmp_path / "elsewhere")
    second = convert(tmp_path / "elsewhere", tmp_path / "deep/er/b.gguf")
    assert first.sha256 == second.sha256
    assert first.path.read_bytes() == second.path.read_bytes()


@pytest.mark.parametrize("spelling", ["rope_theta", "rope_scaling", "rope_parameters"])
def test_both_config_schemas_give_the_same_file(spelling, folders, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    if spelling == "rope_parameters":
        config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    else:
        config["rope_theta"] = 77.0
        key = "type" if spelling == "rope_scaling" else "rope_type"
        config["rope_scaling"] = {key: "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    keys = fields(convert(folder, tmp_path / "x.gguf").path)
    assert keys["llama.rope.freq_base"] == 77.0
    assert keys["llama.rope.scaling.type"] == "linear"
    assert keys["llama.rope.scaling.factor"] == 2.0


def test_yarn_writes_the_quotient_of_attention_factors(tmp_path, tokenizer):
    model = make_model("qwen2", rope={**YARN, "attention_factor": 1.7})
    report = convert(save(model, tokenizer, tmp_path / "hf"), tmp_path / "x.gguf")
    own = 0.1 * math.log(4.0) + 1
    assert fields(report.path)["qwen2.rope.scaling.attn_factor"] == pytest.approx(1.7 / own)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": None}, r"rope_theta=None.*10000"),
        ({"rope_parameters": {"rope_type": "default"}}, r"rope_theta=None"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"rope_theta=-1.0"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": 449}, "vocab_size=449 and .*448 rows"),
        ({"tie_word_embeddings": True}, "differs from"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, "no factor"),
    ],
)
def test_a_missing_or_wrong_key_is_an_error_not_a_default(changes, named, folders, tmp_path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match=named):
        convert(folder, tmp_path / "x.gguf")
    assert list(tmp_path.glob("*gguf*")) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Llama.*Qwen2.*Qwen3"),
        ({"architectures": None}, "none"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "bnb"}}, "quantization_config"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "longrope"),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_slow": 2}},
            "beta_slow=2",
        ),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, "llama3 with qwen2"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(changes, named, folders, tmp_path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitectureError, match=named):
        convert(folder, tmp_path / "x.gguf")


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelConfigError, match=r"no config.json"):
        convert(tmp_path, tmp_path / "x.gguf")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not JSON"):
        convert(tmp_path, tmp_path / "x.gguf")


def test_a17_tokens_above_rows_is_an_error_naming_the_added_tokens(tmp_path):
    tokenizer = make_tokenizer()
    rows = len(tokenizer)
    folder = save(make_model("qwen3", rows=rows), tokenizer, tmp_path / "hf")
    tokenizer.add_tokens(["<new_a>", "<new_b>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(VocabularySizeError, match=rf"{rows} rows.*'<new_a>'.*'<new_b>'"):
        convert(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_a17_editing_the_config_instead_is_an_error_too(tmp_path):
    tokenizer = make_tokenizer()
    folder = save(make_model("qwen3", rows=len(tokenizer)), tokenizer, tmp_path / "hf")
    tokenizer.add_tokens(["<new_a>"])
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match="vocab_size"):
        convert(folder, tmp_path / "x.gguf")


@pytest.mark.parametrize("extra", [0, 1, 51])
def test_a17_rows_above_tokens_are_padded_with_unused_tokens(extra, tmp_path):
    tokenizer = make_tokenizer()
    rows = len(tokenizer) + extra
    folder = save(make_model("qwen3", rows=rows), tokenizer, tmp_path / "hf")
    report = convert(folder, tmp_path / "x.gguf")
    keys = fields(report.path)
    assert report.rows == rows == len(keys["tokenizer.ggml.tokens"])
    assert report.padded == extra
    assert keys["tokenizer.ggml.token_type"].count(5) == extra
    if extra:
        assert keys["tokenizer.ggml.tokens"][-1] == f"[PAD{rows - 1}]"
    with LlamaCppContext(report.path, parallel_sequences=1, n_ctx_per_seq=32) as context:
        assert context.n_vocab == rows
        assert len(next(context.logits_of([[rows - 1]]))) == 1


def test_a17_a_token_called_like_a_pad_does_not_collide(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(f"[PAD{len(tokenizer) + 1}]", special=False)])
    rows = len(tokenizer) + 3
    report = convert(
        save(make_model("qwen3", rows=rows), tokenizer, tmp_path / "hf"), tmp_path / "x.gguf"
    )
    tokens = fields(report.path)["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == rows


def test_overflowing_float16_is_kept_as_bfloat16_and_named(tmp_path, tokenizer, ids):
    model = make_model("qwen2")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = 70000.0
    folder = save(model, tokenizer, tmp_path / "hf")
    report = convert(folder, tmp_path / "x.gguf")
    assert report.kept_wide == ("blk.0.ffn_down.weight: BF16",)
    (tensor,) = [t for t in GGUFReader(report.path).tensors if t.name == "blk.0.ffn_down.weight"]
    assert tensor.tensor_type.name == "BF16"
    assert dequantize(tensor.data, tensor.tensor_type)[0, 0] == 70144.0  # 70000 in 8 bits
    assert kl(hf_logits(model, ids), llama_logits(report.path, ids)) < 1e-3


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("blk.0.ffn_up.weight", np.full((1, 2), 65504.0), "F16"),
        ("blk.0.ffn_up.weight", np.full((1, 2), 65519.0), "F16"),  # rounds down to 65504
        ("blk.0.ffn_up.weight", np.full((1, 2), -65520.0), "BF16"),
        ("blk.0.ffn_up.weight", np.full((1, 2), 3.3895e38), "BF16"),
        ("blk.0.ffn_up.weight", np.full((1, 2), 3.4e38), "F32"),
        ("blk.0.attn_norm.weight", np.ones(2), "F32"),
        ("blk.0.ffn_up.weight", np.zeros((0, 2)), "F16"),
    ],
)
def test_the_narrowest_type_that_holds_the_values(name, values, kind):
    assert stored_type(name, values, "f16") == kind
    assert stored_type(name, values, "f32") == "F32"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_anywhere_fails_by_name_and_leaves_nothing(value, folders, tmp_path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"][5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteWeightError, match=r"layers.1.self_attn.k_proj.bias holds 1"):
        convert(folder, tmp_path / "x.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_sharded_bfloat16_model(tmp_path, tokenizer, ids):
    model = make_model("llama").to(torch.bfloat16)
    folder = tmp_path / "hf"
    model.save_pretrained(folder, max_shard_size="500KB")
    tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    report = convert(folder, tmp_path / "x.gguf")
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert kl(hf_logits(reloaded, ids), llama_logits(report.path, ids)) < 1e-5


def test_adapters_left_in_the_weights_are_refused(folders, tmp_path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.lora_A.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelConfigError, match=r"lora_A.weight; merge"):
        convert(folder, tmp_path / "x.gguf")


def test_untied_without_a_head_is_refused(folders, tmp_path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelConfigError, match=r"hold no lm_head.weight"):
        convert(folder, tmp_path / "x.gguf")


def test_tied_and_written_twice_is_written_once(folders, tmp_path, tokenizer):
    folder = save(make_model("qwen2", tie_word_embeddings=True), tokenizer, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = convert(folder, tmp_path / "x.gguf")
    names = [t.name for t in GGUFReader(report.path).tensors]
    assert "output.weight" not in names and "token_embd.weight" in names


def test_a_tensor_llama_cpp_does_not_know_is_found_when_it_is_opened(folders, tmp_path):
    folder = shutil.copytree(folders["qwen3"], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(256)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionCheckError, match="does not load"):
        convert(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_the_old_file_stays_when_the_new_one_fails(folders, tmp_path):
    out = convert(folders["qwen3"], tmp_path / "x.gguf").path
    before = out.read_bytes()
    with pytest.raises(UnsupportedArchitectureError):
        bad = shutil.copytree(folders["qwen3"], tmp_path / "hf")
        (bad / "config.json").write_text('{"architectures": ["X"]}')
        convert(bad, out)
    assert out.read_bytes() == before


def test_every_architecture_is_tried():
    from quantize.architecture import ARCHITECTURES

    assert {a.gguf_name for a in ARCHITECTURES.values()} == set(CLASSES)


def test_a_pre_tokenizer_that_splits_digits(tmp_path, ids):
    digits = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = make_tokenizer(pre=digits)
    report = convert(save(make_model("llama"), tokenizer, tmp_path / "hf"), tmp_path / "x.gguf")
    assert report.pre_tokenizer == "smollm"
    assert report.texts_checked > 26
