"""Merging is exact, and the tie flag never lies (A19)."""

import json
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import make_model, make_tokenizer, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantize.errors import AdapterMergeError, Float16OverflowError
from quantize.merge import cast_weight, merge_adapter
from tasks.artifacts.content_hash import hash_tensors
from tasks.models.errors import NonFiniteWeightError
from tasks.models.merge import EMBEDDING, HEAD, merged_tensors

IDS = torch.arange(3, 40)[None]


def adapt(base, seed=1, **settings):
    """A peft model whose adapter is far from zero everywhere."""
    peft_model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **settings)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
            elif "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return peft_model


@torch.inference_mode()
def logits(model):
    return model(input_ids=IDS).logits


CASES = {
    # settings, is the head still the embedding after the merge
    "layers": ({"target_modules": ["q_proj", "down_proj"]}, True),
    "head": ({"target_modules": ["lm_head"]}, False),
    "embedding": ({"target_modules": ["embed_tokens"]}, False),
    "both": ({"target_modules": ["embed_tokens", "lm_head", "v_proj"]}, False),
    "saved head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "saved both": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        False,
    ),
    "token rows": ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 7]}, True),
    "tied adapters": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "tied saved": (
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
        True,
    ),
    "rslora": ({"target_modules": ["o_proj"], "use_rslora": True}, True),
    "dora": ({"target_modules": ["o_proj"], "use_dora": True}, True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_a19_merge_save_reload_equals_base_plus_adapter(case, tmp_path, tokenizer):
    settings, tied = CASES[case]
    base = save(make_model("qwen3", tie_word_embeddings=True), tokenizer, tmp_path / "base")
    trained = adapt(AutoModelForCausalLM.from_pretrained(base), **settings)
    trained.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    ).eval()
    expected = logits(reloaded)
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(base)))

    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert (logits(merged) - expected).abs().max() <= 1e-5

    config = json.loads((tmp_path / "merged/config.json").read_text())
    stored = load_file(tmp_path / "merged/model.safetensors")
    assert config["tie_word_embeddings"] is tied
    assert (HEAD in stored) is not tied


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tied", [True, False])
def test_a19_vocabulary_extended_by_three(tied, tmp_path):
    tokenizer = make_tokenizer()
    base = save(
        make_model("llama", rows=len(tokenizer), tie_word_embeddings=tied),
        tokenizer,
        tmp_path / "base",
    )
    model = AutoModelForCausalLM.from_pretrained(base)
    assert tokenizer.add_tokens(["<a>", "<b>", "<c>"]) == 3
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    trained = adapt(model, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    trained.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    expected = logits(trained)

    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.vocab_size == len(tokenizer)
    assert (logits(merged) - expected).abs().max() <= 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").convert_tokens_to_ids("<c>") == (
        len(tokenizer) - 1
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a19_new_rows_the_adapter_does_not_hold_are_named(tmp_path, tokenizer):
    base = save(make_model("llama", rows=400), tokenizer, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(403, mean_resizing=False)
    trained = adapt(model, target_modules=["lm_head"])
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(NonFiniteWeightError, match=r"3 of 403 rows \(first \[400, 401, 402\]\)"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_no_adapter_keeps_the_weights_and_the_hash(tmp_path, tokenizer):
    model = make_model("qwen2")
    base = save(model, tokenizer, tmp_path / "base")
    digest = merge_adapter(base, None, tmp_path / "merged")
    assert digest == hash_tensors(load_file(base / "model.safetensors"))
    assert digest == hash_tensors(load_file(tmp_path / "merged/model.safetensors"))
    assert merge_adapter(base, None, tmp_path / "merged") == digest  # twice, over the first


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_live_model_is_not_touched(tokenizer):
    trained = adapt(
        make_model("qwen3", tie_word_embeddings=True), target_modules=["q_proj", "lm_head"]
    )
    before = {n: p.detach().clone() for n, p in trained.named_parameters()}
    first, second = merged_tensors(trained), merged_tensors(trained)
    assert hash_tensors(first) == hash_tensors(second)
    assert all(torch.equal(p, before[n]) for n, p in trained.named_parameters())
    assert trained.get_base_model().config.tie_word_embeddings is True
    assert HEAD in first


def test_merge_is_base_plus_scaled_product():
    trained = adapt(make_model("qwen2"), target_modules=["up_proj"])
    layer = trained.get_base_model().model.layers[1].mlp.up_proj
    by_hand = layer.base_layer.weight + (8 / 4) * (
        layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    )
    merged = merged_tensors(trained)["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(merged, by_hand.detach()) or (merged - by_hand).abs().max() < 1e-6


def test_bfloat16_training_weights_are_merged_in_float32():
    trained = adapt(make_model("qwen2").to(torch.bfloat16), target_modules=["up_proj"])
    merged = merged_tensors(trained)
    assert {t.dtype for t in merged.values()} == {torch.float32}
    weight = merged["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())  # not rounded on the way


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_anywhere_fails_by_name(value):
    model = make_model("qwen2")
    model.model.layers[1].input_layernorm.weight.data[3] = value
    with pytest.raises(NonFiniteWeightError, match=r"layers.1.input_layernorm.*1 of 256"):
        merged_tensors(model)


def test_nan_in_an_adapter_fails():
    trained = adapt(make_model("qwen2"), target_modules=["q_proj"])
    trained.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight.data[0] = (
        float("nan")
    )
    with pytest.raises(NonFiniteWeightError, match=r"q_proj"):
        merged_tensors(trained)


def test_float16_overflow_is_named_and_bfloat16_takes_it(tmp_path, tokenizer):
    model = make_model("qwen2")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = 70000.0
    base = save(model, tokenizer, tmp_path / "base")
    with pytest.raises(Float16OverflowError, match=r"down_proj.weight holds 70000"):
        merge_adapter(base, None, tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()
    merge_adapter(base, None, tmp_path / "merged", dtype="bfloat16")
    stored = load_file(tmp_path / "merged/model.safetensors")
    assert stored["model.layers.0.mlp.down_proj.weight"][0, 0] == torch.tensor(70000.0).bfloat16()


def test_the_largest_float16_passes():
    assert cast_weight("w", torch.tensor([65504.0, -65504.0]), "float16")[0] == 65504.0
    with pytest.raises(Float16OverflowError):
        cast_weight("w", torch.tensor([65520.0]), "float16")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_another_base_is_refused(tmp_path, tokenizer):
    other = adapt(make_model("qwen2", intermediate_size=256), target_modules=["up_proj"])
    other.save_pretrained(tmp_path / "adapter")
    base = save(make_model("qwen2"), tokenizer, tmp_path / "base")
    with pytest.raises(AdapterMergeError, match="does not fit its base"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")


def test_missing_folders_never_reach_a_hub(tmp_path, tokenizer):
    with pytest.raises(AdapterMergeError, match=r"holds no config.json"):
        merge_adapter(tmp_path / "nowhere", None, tmp_path / "merged")
    base = save(make_model("qwen2"), tokenizer, tmp_path / "base")
    with pytest.raises(AdapterMergeError, match=r"adapter_config.json"):
        merge_adapter(base, tmp_path / "nowhere", tmp_path / "merged")


def test_errors_survive_pickling():
    error = NonFiniteWeightError("x holds NaN")
    assert str(pickle.loads(pickle.dumps(error))) == "x holds NaN"


def test_untied_model_keeps_an_equal_head():
    model = make_model("qwen2", tie_word_embeddings=False)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    merged = merged_tensors(model)
    assert torch.equal(merged[HEAD], merged[EMBEDDING])
