"""Every batch that was trained on, as the learner saw it: what rewards are replayed from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts.typed_file import read_typed, write_typed
from tasks.rl.types import Group

SAMPLES = "samples"
"""Folder of an RL stage."""


@dataclass(frozen=True)
class TrainedSamples:
    """One batch with its rewards."""

    began_at: int
    """Optimiser steps taken before it: the step its rewards were weighed at."""
    groups: tuple[Group, ...]
    advantages: Mapping[str, tuple[float, ...]]
    """Of each rollout, one for each turn."""


class SampleLog:
    """One file a batch, numbered as the lines of `trained_rows.jsonl` are, from 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def batches(self) -> int:
        """Batches kept."""
        return len(self._files())

    def resume(self, batches: int) -> None:
        """Go on after so many batches; later ones are of a dead attempt."""
        for number, path in self._files():
            if number >= batches:
                path.unlink()

    def write(self, batch: int, samples: TrainedSamples) -> None:
        """Keep a batch; once more overwrites."""
        write_typed(self._folder / f"batch-{batch:06d}.json.gz", TrainedSamples, samples)

    def read(self) -> Iterator[tuple[int, TrainedSamples]]:
        """Number and content of each batch, in order.

        Raises:
            TypedFileError: a file cannot be read back.
        """
        for number, path in self._files():
            yield number, read_typed(path, TrainedSamples)

    def _files(self) -> list[tuple[int, Path]]:
        found = self._folder.glob("batch-*.json.gz")
        return sorted((int(path.name.split(".")[0].removeprefix("batch-")), path) for path in found)
