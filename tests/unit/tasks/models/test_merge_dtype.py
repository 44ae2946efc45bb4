"""Merging is float32 whatever the model trained in, and leaves the model alone."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.models.merge import merged_tensors

QUERY = "model.layers.0.self_attn.q_proj.weight"


def tiny(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype)


def test_a_small_change_is_not_lost_beside_a_large_bfloat16_weight():
    model = tiny(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(1.0)
    adapted = get_peft_model(
        model,
        LoraConfig(r=1, lora_alpha=1, target_modules=["q_proj"]),
        autocast_adapter_dtype=False,
    )
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(0.0625)
        layer.lora_B["default"].weight.fill_(0.015625)

    merged = merged_tensors(adapted)

    # 1 + 2^-4 · 2^-6 = 1 + 2^-10, which bfloat16 (steps of 2^-7 above 1) would round to 1.
    assert merged[QUERY].dtype == torch.float32
    assert torch.equal(merged[QUERY], torch.full((16, 16), 1 + 2**-10))
    assert layer.base_layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.base_layer.weight.float(), torch.ones(16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [False, True])
def test_names_are_the_bases_own_and_every_tensor_is_float32(dtype, adapted):
    base = tiny(dtype)
    expected = {k: v.detach().float().clone() for k, v in base.state_dict().items()}
    del expected["lm_head.weight"]  # tied
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["v_proj"])) if adapted else base

    merged = merged_tensors(model)

    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():  # a fresh adapter adds nothing
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
