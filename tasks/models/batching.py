"""Cut a batch into micro-batches of similar lengths under a budget of tokens."""

from collections.abc import Hashable, Sequence

import torch


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    packed: bool = False,
    families: Sequence[Hashable] | None = None,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Indices grouped by length, each micro-batch's longest first, within `max_tokens`.

    What counts is rows × longest, padding included; packed, the real tokens alone. A single row
    longer than the budget gets a micro-batch of its own. Rows of one family, which begin alike,
    stay together as far as the budget goes: packed, they share their beginning. Ranks that step
    together need equally many: micro-batches are halved, and empty ones added, until there are a
    multiple of `multiple_of`.
    """
    order = _longest_first(lengths, families or range(len(lengths)))
    batches: list[list[int]] = []
    tokens = 0
    for index in order:
        tokens += lengths[index]
        padded = (len(batches[-1]) + 1) * lengths[batches[-1][0]] if batches else 0
        if batches and (tokens if packed else padded) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            tokens = lengths[index]
    cut = _multiple(batches, lengths, multiple_of)
    return [sorted(rows, key=lambda i: (-lengths[i], i)) for rows in cut]


def _longest_first(lengths: Sequence[int], families: Sequence[Hashable]) -> list[int]:
    """Families by their longest row, and each family's rows by length."""
    longest: dict[Hashable, tuple[int, int]] = {}
    for i, family in enumerate(families):
        longest[family] = min(longest.get(family, (0, i)), (-lengths[i], i))
    return sorted(range(len(lengths)), key=lambda i: (longest[families[i]], -lengths[i], i))


def _multiple(
    batches: list[list[int]], lengths: Sequence[int], multiple_of: int
) -> list[list[int]]:
    while len(batches) % multiple_of:
        largest = max(
            (i for i, rows in enumerate(batches) if len(rows) > 1),
            key=lambda i: sum(lengths[j] for j in batches[i]),
            default=None,
        )
        if largest is None:
            batches.append([])
            continue
        rows = batches[largest]
        batches[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return batches


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of padding among the tokens of the micro-batches' grids; 0.0 where there are none."""
    grid = sum(len(rows) * max(lengths[i] for i in rows) for rows in batches if rows)
    return 1 - sum(lengths[i] for rows in batches for i in rows) / grid if grid else 0.0


def pad_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Right-padded (B, T) tensor, 0 where there is no element."""
    longest = max((len(row) for row in rows), default=0)
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, dtype=dtype).reshape(len(rows), longest)


def valid_by_length(lengths: Sequence[int]) -> torch.Tensor:
    """bool (B, T): True = a real token. From lengths, never from ids: pad may equal EOS (A08)."""
    length_B = torch.tensor(list(lengths))
    return torch.arange(int(length_B.max()))[None] < length_B[:, None]


def right_padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 (B, T), 0 where a sequence has ended, and bool (B, T): True = a real token."""
    rows = [torch.tensor(list(sequence)) for sequence in sequences]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.arange(ids.shape[1])[None] < lengths[:, None]
