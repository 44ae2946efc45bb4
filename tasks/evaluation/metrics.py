"""Metrics of graded answers: pure functions of `AnswerRecord`s.

N problems, S samples of each. Every answer stays in the denominator: one that could not be scored,
or that holds no answer, counts as an error and is also reported apart from wrong ones (A13, A15).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tasks.evaluation.intervals import wilson_interval
from tasks.evaluation.types import AnswerRecord
from tasks.rewards.verdict import Outcome

BAND_ORDER = ("easy", "medium", "hard")
_PERCENTILES = (50, 90, 99)


class AnswerSetError(ValueError):
    """The answers do not form whole problems: none at all, or samples missing or twice."""


def ordered_bands(bands: Iterable[str]) -> list[str]:
    """Distinct bands, easiest first: the known names in their order, then the others, sorted."""
    rank = {band: i for i, band in enumerate(BAND_ORDER)}
    return sorted(set(bands), key=lambda band: (rank.get(band, len(rank)), band))


def by_problem(records: Sequence[AnswerRecord]) -> dict[str, list[AnswerRecord]]:
    """Answers by row id, in the order rows first appear; each has samples 0 … S−1 once.

    Raises:
        AnswerSetError: no answer, or a problem lacks a sample or has one twice.
    """
    problems: dict[str, list[AnswerRecord]] = defaultdict(list)
    for record in records:
        problems[record.row_id].append(record)
    if not problems:
        raise AnswerSetError("no answers; evaluate at least one problem")
    wanted = max(len(answers) for answers in problems.values())
    for row_id, answers in problems.items():
        got = sorted(a.sample for a in answers)
        if got != list(range(wanted)):
            raise AnswerSetError(
                f"row {row_id!r} has samples {got}; expected each of 0 … {wanted - 1} once"
            )
        answers.sort(key=lambda a: a.sample)
    return dict(problems)


def correctness(records: Sequence[AnswerRecord]) -> np.ndarray:
    """Correct answers as float64 (N, S), 1 = correct, rows in the order problems first appear."""
    problems = by_problem(records)
    return np.array([[float(a.correct) for a in answers] for answers in problems.values()])


def accuracy_block(records: Sequence[AnswerRecord]) -> dict[str, Any]:
    """`{accuracy, ci95, n, answers}`; n is problems, answers is n × S."""
    scores = correctness(records)
    accuracy = float(scores.mean())
    low, high = wilson_interval(accuracy, len(scores))
    return {
        "accuracy": accuracy,
        "ci95": [low, high],
        "n": len(scores),
        "answers": int(scores.size),
    }


def stability(records: Sequence[AnswerRecord]) -> float | None:
    """Share of problems whose S answers are all the same after normalisation.

    A problem with a sample that holds no answer is not stable. None where S is 1: one sample
    says nothing of it.
    """
    problems = by_problem(records)
    if len(next(iter(problems.values()))) < 2:
        return None
    return float(np.mean([_same(answers) for answers in problems.values()]))


def _same(answers: Sequence[AnswerRecord]) -> bool:
    forms = {a.normalised for a in answers}
    return len(forms) == 1 and None not in forms


def lengths(records: Sequence[AnswerRecord]) -> dict[str, float]:
    """Sampled tokens per answer: mean, percentiles (linear interpolation), longest."""
    tokens = np.array([r.tokens for r in records], dtype=np.float64)
    quantiles = np.percentile(tokens, _PERCENTILES)
    return {
        "mean": float(tokens.mean()),
        **{f"p{p}": float(q) for p, q in zip(_PERCENTILES, quantiles, strict=True)},
        "max": float(tokens.max()),
    }


def tool_error_share(records: Sequence[AnswerRecord]) -> float | None:
    """Failed tool calls over all tool calls; None where no tool was called."""
    calls = sum(r.tool_calls for r in records)
    return sum(r.tool_errors for r in records) / calls if calls else None


def evaluate(records: Sequence[AnswerRecord]) -> dict[str, Any]:
    """Every metric of one model's answers, as it goes into `summary.json`."""
    bands: dict[str, list[AnswerRecord]] = defaultdict(list)
    for record in records:
        bands[record.band].append(record)
    counted = Counter(r.outcome for r in records)
    return {
        **accuracy_block(records),
        "by_band": [{"band": b, **accuracy_block(bands[b])} for b in ordered_bands(bands)],
        "outcomes": {outcome.value: counted[outcome] for outcome in Outcome},
        "format_share": _share(r.extracted is not None for r in records),
        "stability": stability(records),
        "lengths": lengths(records),
        "truncated_share": _share(r.truncated for r in records),
        "tool_use_share": _share(r.tool_calls > 0 for r in records),
        "tool_error_share": tool_error_share(records),
        "turns_mean": float(np.mean([r.turns for r in records])),
    }


def _share(flags: Iterable[bool]) -> float:
    return float(np.mean([float(flag) for flag in flags]))
