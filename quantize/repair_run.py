"""Repairs one rejected quantisation: ranks its tensors, searches, and makes the file that ships."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from configs.schema.quantize import QuantGate, QuantType, RepairConfig
from quantize.measure import NO_DIFFERENCE, Judged, Yardstick
from quantize.parity import verdict
from quantize.quantise import describe, quantise, quantised_tensors, redescribed
from quantize.repair import Limits, Mix, Repair, search
from quantize.repair_bench import RepairBench, Subject, mix_name
from quantize.splice import same_tensors, splice

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repaired:
    """What became of a rejected quantisation."""

    of: str
    judged: Judged | None
    """The file that ships, or None."""
    raised: dict[str, tuple[str, str]]
    """Tensor → (type in the recipe, type now)."""
    why: str


class _GateJudge:
    """Holds a mix against the gate: the cheap measures first, answers only where those pass."""

    def __init__(self, bench: RepairBench, yardstick: Yardstick, gate: QuantGate) -> None:
        self._bench, self._yardstick, self._gate = bench, yardstick, gate
        self.passed: dict[frozenset[tuple[str, str]], Judged] = {}

    def problem(self, mix: Mix) -> str | None:
        """Why the mix is rejected, or None where it ships."""
        name = mix_name(self._bench.subject.quant_type, mix)
        path = self._bench.spliced(mix)
        parity = self._yardstick.parities({name: path})[name]
        cheap = verdict(parity, NO_DIFFERENCE, self._gate)
        if not cheap.ships:
            logger.info("%s %s", name, cheap.why)
            return f"{name} {cheap.why}"
        judged = self._yardstick.judge(describe(path), name, parity, self._gate)
        logger.info("%s %s", name, judged.verdict.why)
        if not judged.verdict.ships:
            return f"{name} {judged.verdict.why}"
        self.passed[frozenset(mix.items())] = judged
        return None


@dataclass(frozen=True)
class Ceiling:
    """The next larger type: a repair that is not smaller has no point."""

    name: str
    size_bytes: int


LARGER: tuple[QuantType, ...] = ("IQ2_M", "Q4_K_M", "Q5_K_M", "Q8_0")
"""The recipes from small to large; after the last comes the float file."""


def next_larger(subject: Subject, sizes: Mapping[str, int]) -> Ceiling:
    """The next larger type and its size; made for the purpose where `sizes` does not have it."""
    after = LARGER[LARGER.index(subject.quant_type) + 1 :]
    if not after:
        return Ceiling("F16", subject.f16.stat().st_size)
    name = after[0]
    if name in sizes:
        return Ceiling(name, sizes[name])
    path = subject.file.with_name(f".size-of-{name}.gguf")
    try:
        quantise(subject.f16, path, name, subject.imatrix, threads=subject.threads)
        return Ceiling(name, path.stat().st_size)
    finally:
        path.unlink(missing_ok=True)


def repair(
    subject: Subject,
    yardstick: Yardstick,
    gate: QuantGate,
    ceiling: Ceiling,
    config: RepairConfig,
    progress: Callable[[str], None],
) -> Repaired:
    """Raise tensors of `subject.file` until its gate passes, and write the file beside it.

    Bounded by `config`; every mix is judged as any other file would be.
    """
    started_s = time.monotonic()
    limits = Limits(
        ceiling.size_bytes,
        config.max_tensors,
        lambda: time.monotonic() - started_s > config.time_limit_s,
    )
    folder = subject.file.with_name(f".repair-{subject.quant_type}")
    with RepairBench(subject, folder) as bench:
        groups = bench.groups(yardstick.rollouts[: config.rollouts], config, progress)
        progress(f"{subject.quant_type}: searching for the cheapest mix that passes")
        judge = _GateJudge(bench, yardstick, gate)
        size = subject.file.stat().st_size
        found = search(groups, size, ceiling.name, judge, limits)
        if found.mix is None:
            return Repaired(subject.quant_type, None, {}, found.why)
        before = {t: k for g in groups for t, k in zip(g.tensors, g.rungs[0].types, strict=True)}
        raised = {tensor: (before[tensor], kind) for tensor, kind in found.mix.items()}
        judged = _made(bench, judge, yardstick, gate, found)
    if not judged.verdict.ships:
        judged.report.path.unlink()
        why = f"llama.cpp made another file of the mix: {judged.name} {judged.verdict.why}"
        return Repaired(subject.quant_type, None, {}, why)
    return Repaired(subject.quant_type, judged, raised, found.why)


def _made(
    bench: RepairBench, judge: _GateJudge, yardstick: Yardstick, gate: QuantGate, found: Repair
) -> Judged:
    """Write the mix as llama.cpp makes it; measured again unless its tensors are those judged."""
    assert found.mix is not None
    subject = bench.subject
    name = mix_name(subject.quant_type, found.mix)
    out = subject.file.with_name(f"{name}.gguf")
    report = subject.quantise_with(found.mix, out)
    # rows chosen for the file that is repaired stay chosen
    splice(out, out, dict.fromkeys(_kept(out, found.mix), subject.file))
    report = redescribed(out, report)
    judged = judge.passed[frozenset(found.mix.items())]
    if not same_tensors(out, bench.spliced(found.mix)):
        parity = yardstick.parities({name: out})[name]
        return yardstick.judge(report, name, parity, gate)
    return replace(judged, report=report)


def _kept(gguf: Path, mix: Mix) -> list[str]:
    """The quantised tensors that a mix leaves as they were."""
    return [name for name in quantised_tensors(gguf) if name not in mix]
