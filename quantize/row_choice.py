"""Each row of a quantised matrix from the importance matrix that serves it best.

llama.cpp rounds a matrix row by row, and every row's columns are weighed alike. Which weighing
leaves a row's output nearest to the float one differs from row to row: the mean of x² knows nothing
of how columns move together, nor of the values that stand in the row. So the matrix is quantised
with a few weighings of the same importance matrix, and of every row the rounding is kept whose
output error over the policy's own rollouts, δᵀ (Σ x xᵀ) δ, is the least. Type, size and speed of
the file stay what they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from configs.schema.quantize import QuantType
from quantize.errors import QuantisationError
from quantize.imatrix import ImatrixFile, ImportanceMatrix, read_imatrix, write_imatrix
from quantize.quantise import NEEDS_IMATRIX, QuantReport, quantise, redescribed
from quantize.splice import Replaced, write_like

POWERS = (1.0, 0.75, 0.5, 0.0, 1.5)
"""Weighings by (mean x²)^p: 1 is the importance matrix itself, 0 takes all columns alike."""
NONE = "none"
ROW_WISE: frozenset[QuantType] = frozenset({"Q4_K_M", "Q5_K_M", "IQ2_M"})
"""Types whose rounding depends on an importance matrix."""


@dataclass(frozen=True)
class RowChoice:
    """What was kept, over all matrices that the moments speak of."""

    error_ratio: float
    """Squared output error of the rows kept over that of the plain importance matrix."""
    kept: dict[str, int]
    """Weighing → rows."""


def quantise_by_rows(
    f16: Path,
    out: Path,
    quant_type: QuantType,
    imatrix: Path,
    moments: Mapping[str, np.ndarray],
    *,
    threads: int = 1,
) -> tuple[QuantReport, RowChoice]:
    """Quantise with every weighing and keep the best of each row in `out`.

    Raises:
        QuantisationError: a file could not be made, or moments that do not fit the model.
        ImatrixError: an importance matrix that does not fit.
    """
    matrix = read_imatrix(imatrix)
    with TemporaryDirectory(prefix=".rows-", dir=out.parent) as temporary:
        folder = Path(temporary)
        plain = quantise(f16, folder / "plain.gguf", quant_type, imatrix, threads=threads)
        files = {weighing_name(POWERS[0]): plain.path}
        for power in POWERS[1:]:
            name = weighing_name(power)
            weighed = folder / f"{name}.imatrix.gguf"
            write_imatrix(powered(matrix, power), weighed, matrix.dataset)
            path = folder / f"{name}.gguf"
            files[name] = quantise(f16, path, quant_type, weighed, threads=threads).path
        if quant_type not in NEEDS_IMATRIX:
            path = folder / f"{NONE}.gguf"
            files[NONE] = quantise(f16, path, quant_type, threads=threads).path
        choice = choose_rows(f16, files, moments, out)
    return redescribed(out, plain), choice


def weighing_name(power: float) -> str:
    """As in `x^1.5`."""
    return f"x^{2 * power:g}"


def powered(matrix: ImatrixFile, power: float) -> ImportanceMatrix:
    """(mean x²)^power; a column that is never driven keeps a little weight, as zeros carry none."""
    sums = {
        name: (np.maximum(means.astype(np.float64), means.max() * 1e-9) ** power)
        for name, means in matrix.means.items()
    }
    return ImportanceMatrix(sums, dict.fromkeys(sums, 1), max(1, matrix.rollouts))


def choose_rows(
    f16: Path, files: Mapping[str, Path], moments: Mapping[str, np.ndarray], out: Path
) -> RowChoice:
    """Write the first of `files` to `out` with every row taken from the best of them.

    Raises:
        QuantisationError: the files do not hold the same tensors, or the moments do not fit.
    """
    from gguf import GGUFReader

    names = list(files)
    readers = [GGUFReader(path) for path in files.values()]
    floats = {t.name: t for t in GGUFReader(f16).tensors}
    kept, best_sum, plain_sum = np.zeros(len(names), np.int64), 0.0, 0.0
    tensors: list[Any] = []
    for candidates in zip(*(r.tensors for r in readers), strict=True):
        first = candidates[0]
        _check_same(candidates, names)
        if first.name not in moments or first.tensor_type == floats[first.name].tensor_type:
            tensors.append(first)
            continue
        errors = _errors(candidates, floats[first.name], moments[first.name])
        best = errors.argmin(axis=0)
        rows = [candidates[which].data[row] for row, which in enumerate(best)]
        tensors.append(Replaced.of(first, np.stack(rows)))
        kept += np.bincount(best, minlength=len(names))
        best_sum += float(errors.min(axis=0).sum())
        plain_sum += float(errors[0].sum())
    write_like(readers[0], out, tensors)
    ratio = best_sum / plain_sum if plain_sum else 1.0
    return RowChoice(ratio, dict(zip(names, kept.tolist(), strict=True)))


def _errors(candidates: Sequence[Any], exact: Any, moments: np.ndarray) -> np.ndarray:
    """Float64 (candidates, rows): squared output error of each row."""
    from gguf.quants import dequantize

    weights = dequantize(exact.data, exact.tensor_type).astype(np.float64)
    if moments.shape != (weights.shape[1], weights.shape[1]):
        raise QuantisationError(
            f"{exact.name}: moments of shape {moments.shape} for rows of {weights.shape[1]}; "
            "collect them from the same model"
        )
    found = []
    for candidate in candidates:
        delta = dequantize(candidate.data, candidate.tensor_type).astype(np.float64) - weights
        found.append(np.einsum("rk,rk->r", delta @ moments, delta))
    return np.array(found)


def _check_same(candidates: Sequence[Any], names: Sequence[str]) -> None:
    first = candidates[0]
    for name, other in zip(names, candidates, strict=True):
        if (other.name, other.tensor_type) != (first.name, first.tensor_type):
            raise QuantisationError(
                f"{name} holds {other.name} as {other.tensor_type.name} where {names[0]} holds "
                f"{first.name} as {first.tensor_type.name}; the files are not of one recipe"
            )
