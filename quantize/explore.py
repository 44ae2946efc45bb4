"""Makes and measures many quantisations of one model: the points of its frontier."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from configs.schema.quantize import QuantizeConfig, QuantType, recipe_of
from quantize.divergence import against
from quantize.files import replacing
from quantize.frontier import Point
from quantize.measure import AnswerGreedily, answers_of, paired
from quantize.parity import RESAMPLES, summarise, verdict
from quantize.quantise import describe, quantise
from quantize.repair import runs_within
from quantize.repair_bench import RepairBench, Subject, mix_name
from quantize.repair_run import LARGER
from quantize.rollouts import RolloutTokens
from tasks.artifacts.bootstrap import bootstrap_mean

WORTH_MIXING: frozenset[QuantType] = frozenset({"IQ2_M", "Q4_K_M"})
"""Above these the types themselves lie close to F16 already."""
MIXES_PER_TYPE = 4
"""Mixes measured between two neighbouring types."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Material:
    """What the files are made from and held against."""

    f16: Path
    imatrix: Path
    rollouts: Sequence[RolloutTokens]
    config: QuantizeConfig
    problems: int
    """Held-out problems each file answers."""
    answer_greedily: AnswerGreedily | None
    """None where there are no problems to ask."""
    threads: int = 1


@dataclass
class Explorer:
    """Makes files in `folder` and measures them against F16."""

    material: Material
    folder: Path
    progress: Progress
    known: Mapping[str, Point] = field(default_factory=dict)
    """Points measured before, by name."""
    points: list[Point] = field(default_factory=list)
    _f16_answers: np.ndarray | None = None

    def explore(self, types: Sequence[QuantType], size_bytes: int | None = None) -> list[Point]:
        """Every type, and mixes between the small ones; by size.

        With `size_bytes`, also the mixes that just fit into it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {kind: self._recipe(kind) for kind in types}
        ordered = [kind for kind in LARGER if kind in files]
        sizes = [files[kind].stat().st_size for kind in ordered]
        sizes.append(self.material.f16.stat().st_size)
        for index, kind in enumerate(ordered):
            room = (sizes[index], sizes[index + 1])
            wanted = size_bytes is not None and room[0] < size_bytes < room[1]
            if kind not in WORTH_MIXING and not wanted:
                continue
            self._mixes(self._subject(kind, files[kind]), room, size_bytes)
        self.points.sort(key=lambda p: (p.size_bytes, p.name))
        return self.points

    def make(self, point: Point, out: Path) -> Path:
        """The file of a point, by llama.cpp itself."""
        kind = next(k for k in LARGER if k == recipe_of(point.name))
        subject = self._subject(kind, self.folder / f"{kind}.gguf")
        if point.raised:
            subject.quantise_with(dict(point.raised), out, name=point.name)
        elif out != subject.file:
            with replacing(out) as temporary:
                shutil.copyfile(subject.file, temporary)
        return out

    def _subject(self, kind: QuantType, file: Path) -> Subject:
        material = self.material
        return Subject(material.f16, material.imatrix, file, kind, material.threads)

    def _recipe(self, kind: QuantType) -> Path:
        path = self.folder / f"{kind}.gguf"
        material = self.material
        self.progress(f"quantise to {kind}")
        quantise(material.f16, path, kind, material.imatrix, threads=material.threads)
        if kind in self.known and self.known[kind].size_bytes == path.stat().st_size:
            self.points.append(self.known[kind])
        else:
            self._measure(kind, kind, path, {})
        return path

    def _mixes(self, subject: Subject, room: tuple[int, int], size_bytes: int | None) -> None:
        """Runs of raises at even steps between two types, and the longest that fits a target."""
        low, high = room
        steps = MIXES_PER_TYPE + 1
        targets = [low + (high - low) * i // steps for i in range(1, steps)]
        if size_bytes is not None and low < size_bytes:
            targets.append(min(size_bytes, high - 1))
        with RepairBench(subject, self.folder / f".mixes-{subject.quant_type}") as bench:
            repair = self.material.config.repair
            ranked = self.material.rollouts[: repair.rollouts]
            groups = bench.groups(ranked, repair, self.progress)
            for mix in runs_within(groups, low, targets):
                name = self._free_name(mix_name(subject.quant_type, mix))
                self._measure(name, subject.quant_type, bench.spliced(mix), mix)

    def _free_name(self, name: str) -> str:
        """`name`, or `name.2` and so on: as many tensors can be raised in several ways."""
        taken = {p.name for p in self.points}
        names = (name if i == 1 else f"{name}.{i}" for i in count(1))
        return next(n for n in names if n not in taken)

    def _measure(self, name: str, kind: QuantType, path: Path, mix: Mapping[str, str]) -> None:
        self.progress(f"measure {name}")
        material = self.material
        if material.answer_greedily is not None:
            self._of_f16(material.answer_greedily)  # first: its answers are drafts for the others
        scored = against(material.f16, {name: path}, material.rollouts, material.threads)
        parity = summarise(scored[name])
        report = describe(path)
        accuracy = ships = None
        if material.answer_greedily is not None:
            answers = answers_of(material.answer_greedily, path, material.problems)
            accuracy = bootstrap_mean(answers, resamples=RESAMPLES, seed=0)
            delta = paired(answers, self._of_f16(material.answer_greedily))
            gate = material.config.gates.get(kind)
            ships = None if gate is None else verdict(parity, delta, gate).ships
        self.points.append(
            Point(
                name=name,
                size_bytes=report.size_bytes,
                bits_per_weight=report.bits_per_weight,
                kld=parity.kld,
                accuracy=accuracy,
                ships=ships,
                raised=tuple(sorted(mix.items())),
            )
        )

    def _of_f16(self, answer_greedily: AnswerGreedily) -> np.ndarray:
        """What F16 answers, asked once."""
        if self._f16_answers is None:
            self.progress("answer held-out problems with F16")
            material = self.material
            self._f16_answers = answers_of(answer_greedily, material.f16, material.problems)
        return self._f16_answers
