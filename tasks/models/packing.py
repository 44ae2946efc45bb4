"""Padding-free rows: every layer sees real tokens only, and attention keeps sequences apart.

The tokens of a micro-batch are laid end to end in one row, with positions that start anew. What
mixes tokens, attention, puts them back on grids of sequences of like length: there, causality alone
keeps right-padding out, so no mask of N × N tokens is ever made and the kernels for plain causal
attention serve.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tasks.models.errors import UnpackableModelError

IMPLEMENTATION = "packed_causal"
"""Name of the attention below in transformers' registry."""
MOST_PADDING = 0.05
"""Share of padding in a grid of attention; beyond it, the next rows get a grid of their own."""


@dataclass(frozen=True)
class Grid:
    """A right-padded (B, T) grid, and where its N real tokens stand, row by row."""

    rows: int
    longest: int
    flat_N: torch.Tensor | None
    """int64; None = no padding."""

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


@dataclass(frozen=True)
class Packing:
    """The whole grid of a micro-batch, and the grids that attention cuts it into."""

    whole: Grid
    positions_N: torch.Tensor
    """int64; position of each token in its own sequence."""
    parts: tuple[Grid, ...]
    """Consecutive rows of the whole, each part as wide as its longest row."""
    tokens: tuple[int, ...]
    """Real tokens of each part."""


def packing_of(valid_B_T: torch.Tensor) -> Packing:
    """The packing of a grid whose real tokens are True and stand on the left of each row.

    Few grids come of it where rows of like length follow one another.
    """
    lengths = valid_B_T.sum(dim=1).tolist()
    whole = _grid(valid_B_T)
    columns = torch.arange(whole.longest, device=valid_B_T.device).expand(whole.rows, -1)
    cuts = _cuts(lengths)
    bounds = list(zip(cuts, [*cuts[1:], len(lengths)], strict=True))
    parts = tuple(_grid(valid_B_T[a:b, : max(lengths[a:b])]) for a, b in bounds)
    tokens = tuple(sum(lengths[a:b]) for a, b in bounds)
    return Packing(whole, whole.pack(columns), parts, tokens)


def _grid(valid_B_T: torch.Tensor) -> Grid:
    rows, longest = valid_B_T.shape
    flat = valid_B_T.reshape(-1).nonzero().squeeze(1)
    return Grid(rows, longest, None if len(flat) == rows * longest else flat)


def _cuts(lengths: Sequence[int]) -> list[int]:
    """First rows of the parts."""
    cuts, longest, tokens = [0], 0, 0
    for row, length in enumerate(lengths):
        longest, tokens = max(longest, length), tokens + length
        if tokens < (1 - MOST_PADDING) * (row + 1 - cuts[-1]) * longest:
            cuts.append(row)
            longest = tokens = length
    return cuts


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
    split = [x[0].transpose(0, 1).split(packing.tokens) for x in (query, key, value)]
    outputs = []
    for part, *packed in zip(packing.parts, *split, strict=True):
        grids = [part.unpack(x).transpose(1, 2) for x in packed]
        output_B_T_H_D, _ = sdpa_attention_forward(module, *grids, None, **options)
        outputs.append(part.pack(output_B_T_H_D))
    return torch.cat(outputs)[None], None
