"""Every batch that was trained on, as the learner saw it: what rewards are replayed from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema.rl import RLConfig
from configs.schema.rl_credit import TurnGaeCredit
from tasks.artifacts.typed_file import read_typed, write_typed
from tasks.rl.batch import samples_of, turn_advantages
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
    """Of each rollout, one for each turn; empty where rewards alone do not tell."""


def rewards_tell(config: RLConfig) -> bool:
    """Whether rewards are all that credit needs: a value head, or KL in the reward, needs the
    learner's own scores."""
    return not isinstance(config.credit, TurnGaeCredit) and config.kl.placement != "reward"


def credited(groups: Sequence[Group], config: RLConfig) -> dict[str, tuple[float, ...]]:
    """The advantages of each rollout, one for each turn; none where rewards alone do not tell."""
    if not rewards_tell(config):
        return {}
    samples = samples_of(groups, config.credit, {})
    return {s.scored.rollout.rollout_id: turn_advantages(s) for s in samples}


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
