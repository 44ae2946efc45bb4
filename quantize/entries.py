"""`parity.json`: what is written down about every file, whether it ships or not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantize.convert import ConversionReport
from quantize.measure import Judged, paired
from quantize.parity import RESAMPLES, Parity, attribution
from quantize.quantise import QuantReport, describe
from quantize.repair_run import Repaired
from tasks.artifacts.bootstrap import Interval, bootstrap_mean

F16 = "F16"
NAMED_TENSORS = 8
"""Raised tensors that the verdict names; `repaired.tensors` has all."""


def attributed(answers: Mapping[str, np.ndarray], snapshot: np.ndarray | None) -> dict[str, Any]:
    """What RL did to accuracy, and the sentence that lays a loss at RL's or quantisation's door."""
    rl_delta = None if snapshot is None else paired(answers[F16], snapshot)
    deltas = {name: paired(a, answers[F16]) for name, a in answers.items() if name != F16}
    return {
        "attribution": attribution(rl_delta, deltas),
        "rl_accuracy_delta": None if rl_delta is None else _interval(rl_delta),
        "snapshot_accuracy": None if snapshot is None else float(snapshot.mean()),
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "ci95": [interval.low, interval.high]}


def measured(parity: Parity, answers: np.ndarray) -> dict[str, Any]:
    """KL, top-1, perplexity and accuracy, each with its interval."""
    accuracy = bootstrap_mean(answers, resamples=RESAMPLES, seed=0)
    return {
        "kld_mean": parity.kld.value,
        "kld_mean_ci95": [parity.kld.low, parity.kld.high],
        "top1": parity.top1.value,
        "top1_ci95": [parity.top1.low, parity.top1.high],
        "ppl_ratio": parity.ppl_ratio.value,
        "ppl_ratio_ci95": [parity.ppl_ratio.low, parity.ppl_ratio.high],
        "accuracy": accuracy.value,
        "accuracy_ci95": [accuracy.low, accuracy.high],
    }


def f16_entry(conversion: ConversionReport, parity: Parity, answers: np.ndarray) -> dict[str, Any]:
    """F16 against HF float32; its accuracy is the reference, so its difference is nought."""
    return {
        **described(describe(conversion.path)),
        **measured(parity, answers),
        "accuracy_delta": 0.0,
        "accuracy_delta_ci95": [0.0, 0.0],
        "ships": True,
        "why": (
            f"ships: mean KL to the HF model {parity.kld.value:.3g} nats, top-1 agreement "
            f"{100 * parity.top1.value:.2f} %"
        ),
    }


def entry(judged: Judged) -> dict[str, Any]:
    """One quantisation."""
    return {
        **described(judged.report),
        **measured(judged.parity, judged.answers),
        "accuracy_delta": judged.delta.value,
        "accuracy_delta_ci95": [judged.delta.low, judged.delta.high],
        "ships": judged.verdict.ships,
        "why": judged.verdict.why + _fallen_back(judged.report),
    }


def _fallen_back(quant: QuantReport) -> str:
    """What a name promises and the file does not hold: rows that do not fit the recipe's types."""
    if not quant.fallbacks:
        return ""
    given = Counter(line.rpartition(" became ")[2] for line in quant.fallbacks)
    kinds = ", ".join(f"{count} as {kind}" for kind, count in sorted(given.items()))
    return (
        f"; only by name {quant.path.stem}: the rows of {len(quant.fallbacks)} of "
        f"{sum(quant.tensor_types.values())} matrices do not fit its types ({kinds}), so it has "
        f"{quant.bits_per_weight:.2f} bits per weight"
    )


def described(quant: QuantReport) -> dict[str, Any]:
    """What the file itself says."""
    return {
        "file": quant.path.name,
        "sha256": quant.sha256,
        "size_bytes": quant.size_bytes,
        "bits_per_weight": quant.bits_per_weight,
        "matrix_bits_per_weight": quant.matrix_bits_per_weight,
        "tensor_types": quant.tensor_types,
        "fallbacks": list(quant.fallbacks),
        "without_imatrix": list(quant.uncovered),
    }


def with_repairs(
    variants: dict[str, dict[str, Any]], repairs: Sequence[Repaired]
) -> dict[str, dict[str, Any]]:
    """`variants` with the repaired files, and on each rejected one what became of it."""
    for repaired in repairs:
        rejected = variants[repaired.of]
        rejected["repair"] = {"by": None, "why": repaired.why}
        if repaired.judged is None:
            rejected["why"] += f"; not repaired: {repaired.why}"
            continue
        name = repaired.judged.name
        rejected["repair"]["by"] = name
        rejected["why"] += f"; repaired as {name}"
        fixed = entry(repaired.judged)
        fixed["why"] += f"; {_in_words(repaired)}"
        variants[name] = {**fixed, "repaired": _raised(repaired)}
    return variants


def _in_words(repaired: Repaired) -> str:
    shown = sorted(repaired.raised.items())[:NAMED_TENSORS]
    named = ", ".join(f"{name} as {after}" for name, (_, after) in shown)
    more = len(repaired.raised) - len(shown)
    return f"{repaired.of} with {named}{f' and {more} more' if more else ''}"


def _raised(repaired: Repaired) -> dict[str, Any]:
    tensors = {
        name: {"from": before, "to": after}
        for name, (before, after) in sorted(repaired.raised.items())
    }
    return {"of": repaired.of, "tensors": tensors}
