"""Measures what each tensor of a quantisation costs, and makes mixes: the work behind a repair."""

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema.quantize import QuantType, RepairConfig
from quantize.divergence import against
from quantize.errors import RepairError
from quantize.imatrix import read_imatrix
from quantize.parity import summarise
from quantize.quantise import UNQUANTISED, QuantReport, quantise
from quantize.repair import Group, Rung, neighbours
from quantize.rollouts import RolloutTokens
from quantize.splice import splice

logger = logging.getLogger(__name__)

LADDER = ("Q4_K", "Q6_K", "Q8_0")
"""Types a tensor may be raised to, before the float it came from."""
AT_ONCE = 8
"""Files scored in one pass over the reference."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """One quantisation and what it was made from."""

    f16: Path
    imatrix: Path
    file: Path
    quant_type: QuantType
    threads: int = 1

    def quantise_with(
        self, mix: Mapping[str, str], out: Path, name: str | None = None
    ) -> QuantReport:
        """The recipe with the tensors of `mix` raised, by llama.cpp itself.

        Every quantised tensor is named: the recipe counts the tensors it decides on, so naming only
        some would change the types of others.
        """
        kinds = {n: k for n, k in _types(self.file).items() if k not in UNQUANTISED} | dict(mix)
        overrides = [(f"^{re.escape(name)}$", kind) for name, kind in kinds.items()]
        return quantise(
            self.f16,
            out,
            self.quant_type,
            self.imatrix,
            sorted(overrides),
            threads=self.threads,
            name=name or mix_name(self.quant_type, mix),
        )


def mix_name(quant_type: str, mix: Mapping[str, str]) -> str:
    """The truthful name: the recipe and how many tensors differ from it."""
    return f"{quant_type}+{len(mix)}" if mix else quant_type


class RepairBench:
    """A folder of donor files, from which mixes are spliced together. Close it to clear up."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject = subject
        self._folder = folder
        self._donors: dict[str, Path] = {}

    def __enter__(self) -> "RepairBench":
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_exc: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _donor(self, kind: str) -> Path:
        """A file whose matrices all have the type `kind` (or what llama.cpp falls back to)."""
        if kind not in self._donors:
            path = self._folder / f"all-{kind}.gguf"
            subject = self.subject
            # any recipe without needs of its own will do: the override decides
            quantise(
                subject.f16, path, "Q8_0", subject.imatrix, [(".*", kind)], threads=subject.threads
            )
            self._donors[kind] = path
        return self._donors[kind]

    def spliced(self, mix: Mapping[str, str]) -> Path:
        """A file with this mix, made of the bytes that `quantise_with` would give."""
        path = self._folder / "mix.gguf"
        donors = {name: self._donor_of(name, kind) for name, kind in mix.items()}
        splice(self.subject.file, path, donors)
        return path

    def _donor_of(self, name: str, kind: str) -> Path:
        for donor in [*(self._donor(k) for k in LADDER), self.subject.f16]:
            if _types(donor)[name] == kind:
                return donor
        raise RepairError(f"{name} cannot become {kind}: no donor file holds it so")

    def groups(
        self,
        rollouts: Sequence[RolloutTokens],
        config: RepairConfig,
        progress: Progress,
    ) -> list[Group]:
        """Every quantised tensor, in groups, with what it costs and the types it can have.

        What time does not suffice to measure is left out, and said.
        """
        names = [n for n, kind in _types(self.subject.file).items() if kind not in UNQUANTISED]
        grouped = neighbours(names, config.groups)
        until = time.monotonic() + config.time_limit_s / 2
        harms = self._harms(grouped, rollouts, until, progress)
        if len(harms) < len(grouped):
            logger.warning(
                "%s: %d of %d groups of tensors were not measured within half of "
                "quantize.repair.time_limit_s=%g; they stay as they are",
                self.subject.quant_type, len(grouped) - len(harms), len(grouped),
                config.time_limit_s,
            )  # fmt: skip
        rungs = self._rungs([n for members in grouped[: len(harms)] for n in members])
        return [
            Group(members, harm, _together(members, rungs))
            for members, harm in zip(grouped, harms, strict=False)
        ]

    def _harms(
        self,
        grouped: Sequence[tuple[str, ...]],
        rollouts: Sequence[RolloutTokens],
        until: float,
        progress: Progress,
    ) -> list[float]:
        """KL of the file less its KL with one group given back as floats, by group."""
        started_s = time.monotonic()
        whole = self._kld({"whole": self.subject.file}, rollouts)["whole"]
        now_s = time.monotonic()
        fitting = rollouts_within(len(rollouts), now_s - started_s, len(grouped), until - now_s)
        if fitting < len(rollouts):
            logger.info("%d of %d rollouts, for time", fitting, len(rollouts))
            rollouts = rollouts[:fitting]
            whole = self._kld({"whole": self.subject.file}, rollouts)["whole"]
        harms: list[float] = []
        for start in range(0, len(grouped), AT_ONCE):
            if time.monotonic() > until and harms:
                break
            chunk = grouped[start : start + AT_ONCE]
            progress(f"{self.subject.quant_type}: what tensors cost, {start} of {len(grouped)}")
            files = {}
            for index, members in enumerate(chunk):
                path = self._folder / f"without-{index}.gguf"
                splice(self.subject.file, path, dict.fromkeys(members, self.subject.f16))
                files[str(index)] = path
            found = self._kld(files, rollouts)
            harms += [whole - found[str(i)] for i in range(len(chunk))]
        return harms

    def _kld(
        self, files: Mapping[str, Path], rollouts: Sequence[RolloutTokens]
    ) -> dict[str, float]:
        scored = against(self.subject.f16, files, rollouts, self.subject.threads)
        return {name: summarise(found).kld.value for name, found in scored.items()}

    def _rungs(self, names: Sequence[str]) -> dict[str, list[tuple[str, int, float]]]:
        """(type, bytes, squared error weighted by importance) of each tensor in each file."""
        weights = read_imatrix(self.subject.imatrix).means
        wanted = set(names)
        floats = dict(_tensors(self.subject.f16, wanted))
        found: dict[str, list[tuple[str, int, float]]] = {name: [] for name in names}
        for path in (self.subject.file, *(self._donor(k) for k in LADDER), self.subject.f16):
            for name, tensor in _tensors(path, wanted):
                error = (_values(tensor) - _values(floats[name])) ** 2
                if name in weights:
                    error = error * weights[name]
                entry = (tensor.tensor_type.name, int(tensor.n_bytes), float(error.sum()))
                found[name].append(entry)
        return found


def rollouts_within(rollouts: int, spent_s: float, groups: int, left_s: float) -> int:
    """How many rollouts every group can be measured on in the time left, at least one.

    `spent_s` went into one file and the reference on all of them; in a pass over `AT_ONCE` files
    the reference is computed once.
    """
    needed_s = spent_s / 2 * groups * (AT_ONCE + 1) / AT_ONCE
    if needed_s <= left_s:
        return rollouts
    return max(1, int(rollouts * max(left_s, 0.0) / needed_s))


def _together(
    members: Sequence[str], rungs: Mapping[str, Sequence[tuple[str, int, float]]]
) -> tuple[Rung, ...]:
    """The rungs of a group: its tensors on the same step of the ladder, larger ones only."""
    made: list[Rung] = []
    first = sum(rungs[name][0][2] for name in members)
    for step in zip(*(rungs[name] for name in members), strict=True):
        size = sum(entry[1] for entry in step)
        left = sum(entry[2] for entry in step) / first if first else 0.0
        if not made or size > made[-1].size_bytes:
            made.append(Rung(tuple(entry[0] for entry in step), size, left if made else 1.0))
    return tuple(made)


def _types(gguf: Path) -> dict[str, str]:
    from gguf import GGUFReader

    return {t.name: t.tensor_type.name for t in GGUFReader(gguf).tensors}


def _tensors(gguf: Path, names: set[str]) -> Iterator[tuple[str, Any]]:
    from gguf import GGUFReader

    for tensor in GGUFReader(gguf).tensors:
        if tensor.name in names:
            yield tensor.name, tensor


def _values(tensor: Any) -> np.ndarray:
    """Float32 (rows, columns), dequantised."""
    from gguf.quants import dequantize

    return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
