"""Packed rows: the same scores and gradients as each sequence alone, whatever is packed beside."""

import pytest
import torch

from configs.schema.training import Lora
from tasks.models.batching import micro_batches, pad_rows, padding_share, valid_by_length
from tasks.models.errors import UnpackableModelError
from tasks.models.packing import enable_packing, packing_of
from tasks.models.policy import PolicyModule
from tasks.models.trainable import attach

ROWS = [[5, 6, 0, 7, 8, 0], [9, 0, 4], [3], [11, 12, 13, 14]]


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


def test_a_packing_by_hand():
    packing = packing_of(valid_by_length([3, 1, 2]))
    assert packing.whole.flat_N.tolist() == [0, 1, 2, 3, 6, 7]
    assert packing.positions_N.tolist() == [0, 1, 2, 0, 0, 1]
    grid = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    assert packing.whole.pack(grid).tolist() == [1, 2, 3, 4, 5, 6]
    assert packing.whole.unpack(packing.whole.pack(grid)).tolist() == grid.tolist()
    full = packing_of(valid_by_length([2, 2]))
    assert full.whole.flat_N is None and full.positions_N.tolist() == [0, 1, 0, 1]
    assert full.whole.unpack(full.whole.pack(torch.arange(4).view(2, 2))).tolist() == [
        [0, 1],
        [2, 3],
    ]


def test_attention_pads_rows_of_like_length_only():
    # 20 + 20 + 18 of 60 cells: 3.3 % padding; with 16 it would be 74 of 80, 7.5 %.
    packing = packing_of(valid_by_length([20, 20, 18, 16, 3, 3]))
    assert [(p.rows, p.longest) for p in packing.parts] == [(3, 20), (1, 16), (2, 3)]
    assert packing.tokens == (58, 16, 6) and packing.parts[2].flat_N is None
    mixed = packing_of(valid_by_length([1, 40, 1]))  # in any order, only with more grids
    assert [(p.rows, p.longest) for p in mixed.parts] == [(1, 1), (1, 40), (1, 1)]
    lengths = sorted((1 + (37 * i) % 211 for i in range(200)), reverse=True)
    cells = sum(p.rows * p.longest for p in packing_of(valid_by_length(lengths)).parts)
    assert 1 - sum(lengths) / cells <= 0.05


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


@pytest.mark.parametrize("rows", [ROWS, [ROWS[0]], [[7], [8]], [ROWS[1]] * 3])
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


def test_layers_compute_real_tokens_only(tiny_model):
    module = module_of(tiny_model(), True)
    seen = []
    layer = module.causal_model.model.layers[0].mlp
    layer.register_forward_hook(lambda _m, inputs, _o: seen.append(tuple(inputs[0].shape[:2])))
    scored(module, ROWS)
    assert seen == [(1, sum(map(len, ROWS)))]


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
