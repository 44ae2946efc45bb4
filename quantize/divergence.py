"""Many GGUF files held against one reference on the same token ids, one pass over all of them.

Ids are taken as they were sampled and never as text: a rollout may hold tokens its own text would
not be split into, and a tool that reads text takes special tokens for characters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np

from quantize.parity import SequenceParity, action_rows, compare
from quantize.rollouts import RolloutTokens
from tasks.sampling.llama_cpp_context import LlamaCppContext

Name = TypeVar("Name", bound=str)
SEQUENCES_AT_ONCE = 8


def targets(rollout: RolloutTokens) -> np.ndarray:
    """Ids of the sampled tokens that some position predicts, int64."""
    return np.asarray(rollout.token_ids[1:], np.int64)[np.asarray(rollout.action_mask[1:], bool)]


def wanted_rows(rollouts: Sequence[RolloutTokens]) -> list[np.ndarray]:
    """For each rollout, bool (T,): the positions that predict a sampled token."""
    return [action_rows(r.token_ids, r.action_mask) for r in rollouts]


def scoring_context(gguf: Path, rollouts: Sequence[RolloutTokens], threads: int) -> LlamaCppContext:
    """A context in which the longest of the rollouts has room."""
    longest = max(len(r.token_ids) for r in rollouts)
    return LlamaCppContext(
        gguf, parallel_sequences=SEQUENCES_AT_ONCE, n_ctx_per_seq=longest, threads=threads
    )


def paired_logits(
    reference: Path, files: Mapping[Name, Path], rollouts: Sequence[RolloutTokens], threads: int
) -> Iterator[tuple[np.ndarray, dict[Name, np.ndarray]]]:
    """For each rollout the reference's float32 logits (N, V) at its N sampled tokens, and those of
    every file; only one sequence of each is held at a time."""
    ids = [r.token_ids for r in rollouts]
    wanted = wanted_rows(rollouts)
    with ExitStack() as stack:
        first = stack.enter_context(scoring_context(reference, rollouts, threads))
        streams = {
            name: stack.enter_context(scoring_context(path, rollouts, threads)).logits_of(
                ids, wanted
            )
            for name, path in files.items()
        }
        for p_logits in first.logits_of(ids, wanted):
            yield p_logits, {name: next(stream) for name, stream in streams.items()}


def against(
    reference: Path, files: Mapping[Name, Path], rollouts: Sequence[RolloutTokens], threads: int
) -> dict[Name, list[SequenceParity]]:
    """Every file against the reference, by name and rollout."""
    found: dict[Name, list[SequenceParity]] = {name: [] for name in files}
    pairs = paired_logits(reference, files, rollouts, threads)
    for rollout, (p_logits, others) in zip(rollouts, pairs, strict=True):
        for name, q_logits in others.items():
            found[name].append(compare(p_logits, q_logits, targets(rollout)))
    return found
