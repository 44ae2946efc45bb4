"""Grouped decoding and the roomy cache give what plain attention and a growing cache give."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tasks.sampling import fast_decode
from tasks.sampling.fast_decode import ROOM_TOKENS, RoomyLayer, roomy_cache, use_grouped_decode

VOCABULARY = 50


def tiny(kind: str, kv_heads: int) -> torch.nn.Module:
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "initializer_range": 0.4,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()


@torch.inference_mode()
def decode(model: torch.nn.Module, cache, steps: int, drop_row_at: int | None) -> torch.Tensor:
    """Last-token logits of every step, of fixed tokens, left-padded rows of lengths 7, 4 and 1."""
    rng = torch.Generator().manual_seed(5)
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4, [0] * 6 + [1]])
    ids = torch.randint(VOCABULARY, (3, 7), generator=rng) * mask
    logits = []
    for step in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        last = torch.full((3, VOCABULARY), torch.nan)
        last[: len(ids)] = out.logits[:, -1]
        logits.append(last)
        if step == drop_row_at:
            keep = torch.tensor([0, 1])
            cache.batch_select_indices(keep)
            mask = mask[keep]
        ids = torch.randint(VOCABULARY, (3, 1), generator=rng)[: len(mask)]
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("kind", "kv_heads"), [("llama", 1), ("llama", 2), ("llama", 4), ("qwen3", 2)]
)
def test_logits_equal_plain_attention_with_padding_growth_and_dropped_rows(kind, kv_heads):
    steps = ROOM_TOKENS + 20  # past one growth of the cache
    plain = tiny(kind, kv_heads)
    expected = decode(plain, DynamicCache(config=plain.config), steps, drop_row_at=9)
    fast = tiny(kind, kv_heads)
    use_grouped_decode(fast)

    got = decode(fast, roomy_cache(), steps, drop_row_at=9)

    assert expected[:10].isfinite().all() and expected[10:, 2].isnan().all()
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4, equal_nan=True)
    assert expected[:, 0].std() > 0.1  # logits that differ enough for the comparison to mean much


def test_one_token_goes_by_groups_and_a_prompt_does_not(monkeypatch):
    seen = []
    plain = fast_decode.sdpa_attention_forward

    def recorded(module, query, *args, **kwargs):
        seen.append(query.shape[2])
        return plain(module, query, *args, **kwargs)

    monkeypatch.setattr(fast_decode, "sdpa_attention_forward", recorded)
    model = tiny("llama", 2)
    use_grouped_decode(model)
    decode(model, roomy_cache(), 3, drop_row_at=None)
    assert seen == [7, 7]  # two layers, the prompt only


def test_whole_sequences_score_bit_for_bit_as_before():
    model = tiny("llama", 2)
    ids = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        use_grouped_decode(model)
        after = model(input_ids=ids).logits
    assert torch.equal(before, after)


def test_adapters_are_seen_through():
    model = get_peft_model(tiny("llama", 2), LoraConfig(r=2, target_modules=["q_proj"]))
    use_grouped_decode(model)
    assert model.get_base_model().config._attn_implementation == fast_decode.NAME


def test_a_layer_returns_exactly_what_was_put_in():
    layer = RoomyLayer()
    parts = [torch.randn(2, 3, length, 4) for length in (5, 1, ROOM_TOKENS, 1)]
    for part in parts:
        keys, values = layer.update(part, -part)
    assert torch.equal(keys, torch.cat(parts, dim=-2))
    assert torch.equal(values, -keys)
    layer.batch_select_indices(torch.tensor([1]))
    keys, _ = layer.update(parts[1][:1], parts[1][:1])
    assert layer.get_seq_length() == keys.shape[-2] == 5 + 1 + ROOM_TOKENS + 1 + 1
    assert torch.equal(keys[:, :, :-1], torch.cat(parts, dim=-2)[1:])
