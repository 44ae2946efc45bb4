"""Padding-free rows: every layer sees each distinct token once, and attention keeps rows apart.

The tokens of a micro-batch are laid end to end in one row, with positions that start anew. A token
whose whole prefix stands in an earlier row too is laid there once: samples of a group share their
prompt, and causality gives all of them the same hidden states for it. What mixes tokens, attention,
puts them back on grids of sequences of like length: there, causality alone keeps right-padding out,
so no mask of N × N tokens is ever made and the kernels for plain causal attention serve.
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
    """Consecutive rows of a micro-batch as a right-padded (B, T) grid, beside the packed tokens."""

    source_B_T: torch.Tensor
    """int64; which packed token stands in each cell; 0 on padding, which nothing reads."""
    first_n: torch.Tensor
    """int64; cells, counted row by row, of the packed tokens that these rows are the first to have;
    they follow one another among all packed tokens."""

    def pack(self, grid: torch.Tensor) -> torch.Tensor:
        """(B, T, …) → (n, …): these rows' own part of the packed tokens."""
        return grid.flatten(0, 1).index_select(0, self.first_n)

    def unpack(self, packed_N: torch.Tensor) -> torch.Tensor:
        """(N, …) → (B, T, …) from the packed tokens of the whole micro-batch."""
        cells = packed_N.index_select(0, self.source_B_T.flatten())
        return cells.unflatten(0, tuple(self.source_B_T.shape))


@dataclass(frozen=True)
class Packing:
    """The whole grid of a micro-batch, and the grids that attention cuts it into."""

    whole: Grid
    positions_N: torch.Tensor
    """int64; position of each packed token in its sequence."""
    parts: tuple[Grid, ...]
    """Consecutive rows of the whole, each part as wide as its longest row."""


def packing_of(token_ids_B_T: torch.Tensor, valid_B_T: torch.Tensor) -> Packing:
    """The packing of a grid whose real tokens are True and stand on the left of each row.

    Few grids come of it where rows of like length follow one another.
    """
    lengths = valid_B_T.sum(dim=1).tolist()
    rows = [ids[:n] for ids, n in zip(token_ids_B_T.tolist(), lengths, strict=True)]
    sources, firsts = _distinct(rows)
    device = token_ids_B_T.device
    source_B_T = torch.zeros_like(token_ids_B_T)
    source_B_T[valid_B_T] = torch.tensor(sources, device=device)
    row_N, position_N = torch.tensor(firsts, device=device).T

    def grid(start: int, end: int) -> Grid:
        longest = max(lengths[start:end])
        own = (row_N >= start) & (row_N < end)
        first_n = (row_N[own] - start) * longest + position_N[own]
        return Grid(source_B_T[start:end, :longest], first_n)

    cuts = _cuts(lengths)
    bounds = zip(cuts, [*cuts[1:], len(lengths)], strict=True)
    return Packing(grid(0, len(lengths)), position_N, tuple(grid(*ends) for ends in bounds))


def _distinct(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The packed token of each token, row after row; and the row and position of each packed one.

    Packed tokens are the nodes of the rows' prefix tree, numbered in the order of their coming.
    """
    nodes: dict[tuple[int, int], int] = {}
    sources, firsts = [], []
    for row, tokens in enumerate(rows):
        node = -1
        for position, token in enumerate(tokens):
            node = nodes.setdefault((node, token), len(nodes))
            sources.append(node)
            if node == len(firsts):
                firsts.append((row, position))
    return sources, firsts


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
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]
    outputs = []
    for part in packing.parts:
        grids = [part.unpack(x).transpose(1, 2) for x in packed]
        output_B_T_H_D, _ = sdpa_attention_forward(module, *grids, None, **options)
        outputs.append(part.pack(output_B_T_H_D))
    return torch.cat(outputs)[None], None
