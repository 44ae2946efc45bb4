"""Grouped products are those of one token after another, and tokens without an adapter get none."""

import pytest
import torch

from tasks.sampling.vllm_cpu_adapters import expand, expand_slice, shrink

SLOTS, RANK, ROOM, INSIDE, OUTSIDE = 3, 2, 4, 5, 6

CROWDS = [
    [0, 0, 0, 0],
    [2, 2],
    [0, 1, 0, 2, 1],
    [-1, 1, -1, 0],
    [-1, -1],
    [1],
]


def token_by_token(inputs, weights, adapters) -> torch.Tensor:
    nothing = torch.zeros(weights.shape[-2])
    rows = [
        weights[slot, 0] @ row if slot >= 0 else nothing
        for row, slot in zip(inputs, adapters, strict=True)
    ]
    return torch.stack(rows)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("adapters", CROWDS)
def test_shrink(adapters):
    inputs, a = torch.randn(len(adapters), INSIDE), torch.randn(SLOTS, 1, RANK, INSIDE)
    output = torch.full((len(adapters), ROOM), 9.0)
    shrink(inputs, a, output, torch.tensor(adapters), 0.5)
    torch.testing.assert_close(output[:, :RANK], 0.5 * token_by_token(inputs, a, adapters))
    assert (output[:, RANK:] == 9).all()


@pytest.mark.parametrize("adapters", CROWDS)
@pytest.mark.parametrize("add", [True, False])
def test_expand(adapters, add):
    inputs, b = torch.randn(len(adapters), RANK), torch.randn(SLOTS, 1, OUTSIDE, RANK)
    before = torch.randn(len(adapters), OUTSIDE)
    wanted = token_by_token(inputs, b, adapters) + (before if add else 0)
    output = before.clone()
    expand(inputs, b, output, torch.tensor(adapters), add)
    torch.testing.assert_close(output, wanted)


@pytest.mark.parametrize("adapters", CROWDS)
def test_expand_into_a_slice_leaves_the_others(adapters):
    inputs, b = torch.randn(len(adapters), RANK), torch.randn(SLOTS, 1, OUTSIDE, RANK)
    output = torch.ones(len(adapters), 4 + OUTSIDE + 3)
    expand_slice(inputs, b, output, torch.tensor(adapters), 4, OUTSIDE)
    torch.testing.assert_close(output[:, 4:-3], 1 + token_by_token(inputs, b, adapters))
    assert (output[:, :4] == 1).all() and (output[:, -3:] == 1).all()


def test_sums_are_taken_in_the_precision_of_the_output():
    inputs = torch.randn(3, INSIDE).bfloat16()
    a = torch.randn(SLOTS, 1, RANK, INSIDE).bfloat16()
    output = torch.zeros(3, RANK)
    shrink(inputs, a, output, torch.tensor([1, 1, 1]))
    torch.testing.assert_close(output, inputs.float() @ a[1, 0].float().T)
