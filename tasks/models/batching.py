"""Cut a batch into micro-batches of similar lengths under a budget of padded tokens."""

from collections.abc import Sequence

import torch


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped by length, longest first; rows × longest stays within `max_tokens`.

    A single row longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pad_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Right-padded (B, T) tensor, 0 where there is no element."""
    longest = max((len(row) for row in rows), default=0)
    padded = torch.zeros(len(rows), longest, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def valid_by_length(lengths: Sequence[int]) -> torch.Tensor:
    """bool (B, T): True = a real token. From lengths, never from ids: pad may equal EOS (A08)."""
    length_B = torch.tensor(list(lengths))
    return torch.arange(int(length_B.max()))[None] < length_B[:, None]
