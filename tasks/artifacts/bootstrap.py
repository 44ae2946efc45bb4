"""Percentile bootstrap intervals: of a mean, and of the difference of two paired means.

The unit that is resampled is the problem (or the sequence), never the token, because tokens of
one sequence depend on each other (Efron & Tibshirani, An Introduction to the Bootstrap, ch. 13).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_CELLS_AT_ONCE = 4_000_000


class BootstrapInputError(ValueError):
    """The numbers cannot be resampled; says which and what was expected."""


class Interval(NamedTuple):
    """A figure with its interval. `value` is that of the whole sample, not the bootstrap mean."""

    value: float
    low: float
    high: float


def bootstrap_mean(
    values: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Mean of `values` (N,) with a percentile interval.

    With `weights` (N,) it is the ratio Σ w·v / Σ w, resampled by unit: a token mean whose units
    are sequences has the sequences' means as values and their token counts as weights.

    Raises:
        BootstrapInputError: no value, a value that is not finite, weights that do not fit.
    """
    units = _checked("values", values)
    mass = np.ones_like(units) if weights is None else _checked("weights", weights)
    if mass.shape != units.shape or (mass < 0).any() or mass.sum() <= 0:
        raise BootstrapInputError(
            f"weights of shape {mass.shape} for values of shape {units.shape}; expected one "
            "weight of at least 0 each, not all 0"
        )
    keep = mass > 0
    units, mass = units[keep], mass[keep]
    means = np.empty(resamples)
    for start, counts in _resampled_counts(len(units), resamples, seed):
        means[start : start + len(counts)] = (counts @ (units * mass)) / (counts @ mass)
    value = float(units @ mass / mass.sum())
    return _percentile_interval(value, means, level)


def paired_bootstrap(
    a: np.ndarray,
    b: np.ndarray,
    *,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """mean(a) − mean(b) with a percentile interval; `a[i]` and `b[i]` speak of the same problem.

    Problems are drawn with replacement, and both scores of a drawn problem come along, so that
    what is common to both cancels. Scores are (N,), or (N, S) for S samples of each problem,
    which are averaged within the problem first; the two sides may have different S.

    Raises:
        BootstrapInputError: the two sides do not have the same problems, or a score is not finite.
    """
    first, second = _per_problem("a", a), _per_problem("b", b)
    if first.shape != second.shape:
        raise BootstrapInputError(
            f"a has {len(first)} problems and b has {len(second)}; a paired bootstrap needs the "
            "same problems in the same order"
        )
    return bootstrap_mean(first - second, resamples=resamples, seed=seed, level=level)


def _per_problem(name: str, scores: np.ndarray) -> np.ndarray:
    """(N,) or (N, S) → (N,) means within each problem."""
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim == 2 and array.shape[1]:
        array = array.mean(axis=1)
    return _checked(name, array)


def _checked(name: str, values: np.ndarray) -> np.ndarray:
    """`values` as float64 (N,), N ≥ 1, all finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise BootstrapInputError(
            f"{name} has shape {array.shape}; expected one number for each problem, at least one"
        )
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise BootstrapInputError(
            f"{name}[{bad[0]}]={array[bad[0]]} is not finite ({bad.size} such); an unknown score "
            "must be left out on both sides, never counted as 0 or 1"
        )
    return array


def _resampled_counts(n: int, resamples: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (start, counts (r, n)): how often each unit was drawn in each resample."""
    if resamples < 1:
        raise BootstrapInputError(f"resamples={resamples}; expected at least 1")
    rng = np.random.default_rng(seed)
    chunk = max(1, _CELLS_AT_ONCE // n)
    uniform = np.full(n, 1.0 / n)
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        yield start, rng.multinomial(n, uniform, size=size).astype(np.float64)


def _percentile_interval(value: float, resampled: np.ndarray, level: float) -> Interval:
    """The central `level` of the resampled figures."""
    tail = (1.0 - level) / 2
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Interval(value, float(low), float(high))
