"""Adapters on a CPU by one product for each adapter in use.

vLLM's CPU build copies both matrices of the adapter once for every token, then multiplies: with
rank 16 on all projections that costs many times the model itself. Nearly always all tokens of a
batch share one adapter, whose matrices can then be used where they lie. A token without an adapter
(index −1) gets nothing; vLLM's own functions would take the last slot's.
"""

from collections.abc import Iterator

import torch


def use_grouped_adapters() -> None:
    """Put these functions in the place of vLLM's, inside its worker."""
    from vllm.lora.ops.torch_ops import lora_ops

    lora_ops.bgmv_shrink = shrink
    lora_ops.bgmv_expand = expand
    lora_ops.bgmv_expand_slice = expand_slice


def shrink(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """output (N, ≥r) = scaling · inputs (N, in) Aᵀ, A = weights (slots, 1, r, in) of each token."""
    rank = weights.shape[-2]
    output[:, :rank] = 0
    for slot, rows in _groups(adapters):
        product = _times(inputs[rows], weights, slot, output.dtype)
        output[rows, :rank] = scaling * product


def expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """output (N, out) += inputs (N, r) Bᵀ, B = weights (slots, 1, out, r) of each token."""
    width = min(weights.shape[-2], output.shape[1])
    expand_slice(inputs, weights[..., :width, :], output, adapters, 0, width, add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    offset: int,
    width: int,
    add_inputs: bool = True,
) -> None:
    """`expand` into the columns `[offset, offset + width)`."""
    target = output[:, offset : offset + width]
    if not add_inputs:
        target.zero_()
    for slot, rows in _groups(adapters):
        target[rows] += _times(inputs[rows], weights, slot, output.dtype)


def _times(
    inputs: torch.Tensor, weights: torch.Tensor, slot: int, dtype: torch.dtype
) -> torch.Tensor:
    matrix = weights[slot]
    if matrix.dim() == 3:
        matrix = matrix.squeeze(0)
    return torch.nn.functional.linear(inputs.to(dtype), matrix.to(dtype))


def _groups(adapters: torch.Tensor) -> Iterator[tuple[int, slice | torch.Tensor]]:
    """Each slot in use and the rows that use it."""
    for slot in adapters.unique().tolist():
        if slot < 0:
            continue
        same = adapters == slot
        yield slot, slice(None) if bool(same.all()) else same.nonzero().squeeze(-1)
