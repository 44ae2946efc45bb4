"""Padding-free rows: every layer sees real tokens only, and attention keeps sequences apart.

The tokens of a micro-batch are laid end to end in one row, with positions that start anew. What
mixes tokens, attention, puts them back on a (B, T) grid: there, causality alone keeps right-padding
out, so no mask of N × N tokens is ever made and the kernels for plain causal attention serve.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tasks.models.errors import UnpackableModelError

IMPLEMENTATION = "packed_causal"
"""Name of the attention below in transformers' registry."""


@dataclass(frozen=True)
class Packing:
    """Where the N real tokens of a right-padded (B, T) grid stand in one row, and back."""

    rows: int
    longest: int
    flat_N: torch.Tensor | None
    """int64; index of each real token in the grid, row by row; None = the grid has no padding."""
    positions_N: torch.Tensor
    """int64; position of each token in its own sequence."""

    def pack(self, grid: torch.Tensor) -> torch.Tensor:
        """(B, T, …) → (N, …)."""
        flat = grid.reshape(self.rows * self.longest, *grid.shape[2:])
        return flat if self.flat_N is None else flat[self.flat_N]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """(N, …) → (B, T, …), 0 on padding."""
        if self.flat_N is not None:
            shape = (self.rows * self.longest, *packed.shape[1:])
            packed = packed.new_zeros(shape).index_copy(0, self.flat_N, packed)
        return packed.reshape(self.rows, self.longest, *packed.shape[1:])


def packing_of(valid_B_T: torch.Tensor) -> Packing:
    """The packing of a grid whose real tokens are True and stand on the left of each row."""
    rows, longest = valid_B_T.shape
    positions = torch.arange(longest, device=valid_B_T.device).repeat(rows)
    flat = valid_B_T.reshape(-1).nonzero().squeeze(1)
    if len(flat) == rows * longest:
        return Packing(rows, longest, None, positions)
    return Packing(rows, longest, flat, positions[flat])


def enable_packing(model: PreTrainedModel) -> None:
    """Have a model understand `packing=` in its trunk's forward; without it nothing changes for
    right-padded rows.

    Raises:
        UnpackableModelError: the model attends within a sliding window, which is not packed.
    """
    from transformers import AttentionInterface

    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnpackableModelError(
            f"deepspeed.micro_batching=packed: this model has layers of {sorted(kinds)}, and only "
            "full attention is packed; set it to bucketed"
        )
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    model.set_attn_implementation(IMPLEMENTATION)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence; over the rows as they are without `packing`.

    Args:
        query: (1, heads, N, dim) where packed; key and value alike, with their own heads.

    Returns:
        (1, N, heads, dim), and no attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grids = [packing.unpack(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value)]
    output_B_T_H_D, _ = sdpa_attention_forward(module, *grids, None, **options)
    return packing.pack(output_B_T_H_D)[None], None
