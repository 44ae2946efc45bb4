"""Packed rows: the same scores and gradients as each sequence alone, whatever is packed beside."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora import Linear
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from configs.schema.training import Lora
from tasks.models.batching import micro_batches, pad_rows, padding_share, valid_by_length
from tasks.models.errors import UnpackableModelError
from tasks.models.lora_layer import MergedLoraLinear
from tasks.models.packing import enable_packing, packing_of
from tasks.models.policy import PolicyModule
from tasks.models.trainable import attach

ROWS = [[5, 6, 0, 7, 8, 0], [9, 0, 4], [3], [11, 12, 13, 14]]
GROUPS = [[5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 1], [5, 6, 7, 2], [4, 6, 7, 8, 9, 1], [5, 6, 7, 8], [5]]
"""A prompt and three ways on, one of them twice as far; another prompt; two that end early."""


def masks(rows):
    return [[False] + [True] * (len(row) - 1) for row in rows]


def scored(module: PolicyModule, rows, temperature=0.9):
    return module(
        pad_rows(rows, torch.long),
        valid_by_length([len(r) for r in rows]),
        pad_rows(masks(rows), torch.bool),
        torch.full((len(rows),), temperature),
    )


def module_of(model, packed: bool) -> PolicyModule:
    lora = Lora(r=4, targets=("q_proj", "v_proj", "down_proj"))
    trained = attach(model, lora, seed=0)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return PolicyModule(trained, value_head=True, seed=0, packed=packed)


def packed(rows):
    return packing_of(pad_rows(rows, torch.long), valid_by_length([len(r) for r in rows]))


def unlike(lengths):
    """Rows of these lengths, no two of which begin alike."""
    return [[i] * length for i, length in enumerate(lengths)]


def test_a_packing_by_hand():
    packing = packed([[1, 2, 3], [4], [5, 6]])
    assert packing.whole.source_B_T.tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
    assert packing.whole.first_n.tolist() == [0, 1, 2, 3, 6, 7]
    assert packing.positions_N.tolist() == [0, 1, 2, 0, 0, 1]
    grid = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    assert packing.whole.pack(grid).tolist() == [1, 2, 3, 4, 5, 6]
    assert packing.whole.unpack(packing.whole.pack(grid)).tolist() == [
        [1, 2, 3],
        [4, 1, 1],  # what stands on padding is not to be read
        [5, 6, 1],
    ]


def test_a_shared_beginning_is_packed_once_by_hand():
    # A prompt of two, two ways on; a prefix of the first; the same again; and its end elsewhere.
    rows = [[7, 8, 1, 2], [7, 8, 3], [7, 8], [7, 8, 3], [8, 3]]
    packing = packed(rows)
    grid = pad_rows(rows, torch.long)
    assert packing.whole.pack(grid).tolist() == [7, 8, 1, 2, 3, 8, 3]
    assert packing.positions_N.tolist() == [0, 1, 2, 3, 2, 0, 1]
    unpacked = packing.whole.unpack(packing.whole.pack(grid))
    valid = valid_by_length([len(r) for r in rows])
    assert torch.equal(unpacked[valid], grid[valid])
    parts = [part.pack(grid[a:b, : part.source_B_T.shape[1]]).tolist()
             for part, (a, b) in zip(packing.parts, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
                                     strict=True)]  # fmt: skip
    assert parts == [[7, 8, 1, 2], [3], [], [], [8, 3]]


def test_attention_pads_rows_of_like_length_only():
    # 20 + 20 + 18 of 60 cells: 3.3 % padding; with 16 it would be 74 of 80, 7.5 %.
    packing = packed(unlike([20, 20, 18, 16, 3, 3]))
    assert [tuple(p.source_B_T.shape) for p in packing.parts] == [(3, 20), (1, 16), (2, 3)]
    assert [len(p.first_n) for p in packing.parts] == [58, 16, 6]
    mixed = packed(unlike([1, 40, 1]))  # in any order, only with more grids
    assert [tuple(p.source_B_T.shape) for p in mixed.parts] == [(1, 1), (1, 40), (1, 1)]
    lengths = sorted((1 + (37 * i) % 211 for i in range(200)), reverse=True)
    cells = sum(p.source_B_T.numel() for p in packed(unlike(lengths)).parts)
    assert 1 - sum(lengths) / cells <= 0.05


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9))
def test_any_rows_come_back_from_their_packing(rows):
    packing, grid = packed(rows), pad_rows(rows, torch.long)
    valid = valid_by_length([len(r) for r in rows])
    distinct = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    tokens_N = packing.whole.pack(grid)
    assert len(tokens_N) == len(packing.positions_N) == len(distinct)
    assert torch.equal(packing.whole.unpack(tokens_N)[valid], grid[valid])
    first, pieces = 0, []
    for part in packing.parts:
        height, longest = part.source_B_T.shape
        own = slice(first, first + height)
        assert torch.equal(
            part.unpack(tokens_N)[valid[own, :longest]], grid[own, :longest][valid[own, :longest]]
        )
        pieces.append(part.pack(grid[own, :longest]))
        first += height
    assert torch.equal(torch.cat(pieces), tokens_N)


@pytest.mark.parametrize("packed", [True, False])
def test_what_else_is_in_the_batch_changes_no_score(tiny_model, packed):
    module = module_of(tiny_model(), packed).eval()
    together = scored(module, ROWS)
    for i, row in enumerate(ROWS):
        alone = scored(module, [row])
        for ours, own in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[i, : len(row)], own[0], rtol=0, atol=1e-5)
    other = [*ROWS[:1], [30, 31, 32], *ROWS[2:]]
    assert torch.equal(scored(module, other).logprobs_B_T[0], together.logprobs_B_T[0])


@pytest.mark.parametrize("rows", [ROWS, [ROWS[0]], [[7], [8]], [ROWS[1]] * 3, GROUPS])
def test_the_gradient_is_that_of_sequences_one_by_one(tiny_model, rows):
    def gradient(packed: bool, batches) -> torch.Tensor:
        module = module_of(tiny_model(), packed).eval()
        for batch in batches:
            scores = scored(module, batch)
            weight = torch.arange(1.0, scores.logprobs_B_T.shape[1] + 1)
            valid = valid_by_length([len(r) for r in batch])
            ((scores.logprobs_B_T + valid * scores.values_B_T) * weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])

    packed, single = gradient(True, [rows]), gradient(False, [[row] for row in rows])
    assert single.norm() > 1e-3
    assert (packed - single).norm() <= 1e-5 * single.norm()


def test_layers_compute_distinct_real_tokens_only(tiny_model):
    module = module_of(tiny_model(), True)
    seen = []
    layer = module.causal_model.model.layers[0].mlp
    layer.register_forward_hook(lambda _m, inputs, _o: seen.append(tuple(inputs[0].shape[:2])))
    scored(module, ROWS)
    scored(module, GROUPS)  # 6, then 1, 1, a prompt of its own 6, and two that add nothing
    assert seen == [(1, sum(map(len, ROWS))), (1, 14)]


def test_a_saved_config_does_not_name_the_attention(tiny_model, tmp_path):
    model = tiny_model()
    enable_packing(model)
    model.config.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()


def test_sliding_windows_are_refused(tiny_model):
    model = tiny_model()
    model.config.layer_types = ["sliding_attention"]
    with pytest.raises(UnpackableModelError, match=r"sliding_attention.*bucketed"):
        PolicyModule(model, value_head=False, seed=0, packed=True)


def test_packed_micro_batches_by_hand():
    # Real tokens count, not the grid: 5 + 5 + 3 + 1 = 14.
    assert micro_batches([3, 5, 1, 5], 14, packed=True) == [[1, 3, 0, 2]]
    assert micro_batches([3, 5, 1, 5], 13, packed=True) == [[1, 3, 0], [2]]
    assert micro_batches([20, 1], 13, packed=True) == [[0], [1]]


def test_families_stay_together_by_hand():
    # Family a has 5 + 2, b has 4 + 3; each micro-batch holds one of them, its longest row first.
    lengths, families = [2, 3, 5, 4], ["a", "b", "a", "b"]
    assert micro_batches(lengths, 9, packed=True) == [[2, 3], [1, 0]]
    assert micro_batches(lengths, 9, packed=True, families=families) == [[2, 0], [3, 1]]
    assert micro_batches(lengths, 14, packed=True, families=families) == [[2, 3, 1, 0]]
    assert micro_batches(lengths, 14, packed=True, families=families, multiple_of=2) == [
        [2, 0],
        [3, 1],
    ]
    assert micro_batches([], 9, packed=True, families=[]) == []


@pytest.mark.parametrize("packed", [True, False])
def test_ranks_get_equally_many_micro_batches(packed):
    lengths = [4, 4, 4, 4]
    assert micro_batches(lengths, 100, packed=packed, multiple_of=2) == [[0, 1], [2, 3]]
    assert micro_batches(lengths, 100, packed=packed, multiple_of=3) == [[0], [1], [2, 3]]
    assert micro_batches([4, 4], 100, packed=packed, multiple_of=3) == [[0], [1], []]
    assert micro_batches(lengths, 4, packed=packed, multiple_of=4) == [[0], [1], [2], [3]]


def test_padding_share_by_hand():
    assert padding_share([3, 1, 2], [[0, 1], [2], []]) == pytest.approx(1 - 6 / 8)
    assert padding_share([], []) == 0.0


SHAPE = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("way", [{}, {"recompute": True}, {"recompute": True, "logits_chunk": 3}])
def test_every_shape_and_every_way_to_save_memory_gives_the_plain_gradient(kind, way):
    """Packed, merged and in chunks against padded, unmerged and whole; KL to the base included."""

    def gradient(packed: bool, plain: bool, **options) -> torch.Tensor:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(kind(**SHAPE, head_dim=8))
        trained = attach(model, Lora(r=4, targets=("q_proj", "o_proj", "up_proj", "lm_head")), 0)
        for i, (name, parameter) in enumerate(trained.named_parameters()):
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(i))
        for layer in trained.modules():
            if plain and isinstance(layer, MergedLoraLinear):
                layer.__class__ = Linear
        module = PolicyModule(trained, value_head=True, seed=0, packed=packed, **options).train()
        with torch.no_grad(), module.as_reference():
            reference = scored(module, GROUPS).logprobs_B_T
        scores = scored(module, GROUPS)
        kl = (scores.logprobs_B_T - reference).square().sum()
        values = scores.values_B_T[valid_by_length([len(r) for r in GROUPS])]
        (scores.logprobs_B_T.sum() + kl + values.square().sum()).backward()
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])

    ours, plain = gradient(True, False, **way), gradient(False, True)
    assert plain.norm() > 1e-3
    assert (ours - plain).norm() <= 1e-5 * plain.norm()
