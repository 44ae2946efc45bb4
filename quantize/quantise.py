"""Quantises a GGUF file with llama.cpp and reports what each tensor really became."""

import ctypes
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema.quantize import QuantType
from quantize.convert import is_matrix
from quantize.errors import ImatrixError, QuantisationError
from quantize.files import replacing
from quantize.imatrix import ImatrixFile, read_imatrix
from tasks.artifacts.content_hash import hash_file
from tasks.sampling.llama_cpp_context import captured_log

NEEDS_IMATRIX: frozenset[QuantType] = frozenset({"IQ2_M"})
_FTYPE: dict[QuantType, int] = {"Q8_0": 7, "Q5_K_M": 17, "Q4_K_M": 15, "IQ2_M": 29}
UNQUANTISED = frozenset({"F32", "F16", "BF16"})
"""Types of tensors that quantising left as floats."""
_TAG_INT, _TAG_STR = 0, 3
NAME_KEY = "quantize.name"
"""Where a file with raised tensors says its true name."""


@dataclass(frozen=True)
class QuantReport:
    """What a file really holds; sizes in bytes, bits counted over tensor data only."""

    path: Path
    sha256: str
    size_bytes: int
    bits_per_weight: float
    """Of all tensors."""
    matrix_bits_per_weight: float
    tensor_types: dict[str, int]
    """Type → how many matrices."""
    fallbacks: tuple[str, ...] = ()
    """One line for each tensor whose rows do not fit the wanted type."""
    uncovered: tuple[str, ...] = ()
    """Quantised tensors that the importance matrix says nothing about."""


def quantise(
    source: Path,
    out: Path,
    quant_type: QuantType,
    imatrix: Path | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    threads: int = 1,
    name: str | None = None,
) -> QuantReport:
    """Quantise the float file `source` into `out`; the bytes do not depend on `threads`.

    `overrides` are (regular expression over tensor names, GGML type name) and win over the recipe;
    `name` says in the file what they made of it, as in `IQ2_M+3`.

    Raises:
        ImatrixError: IQ2_M without an importance matrix, or one that does not fit.
        QuantisationError: llama.cpp failed; with its log.
    """
    if quant_type in NEEDS_IMATRIX and imatrix is None:
        raise ImatrixError(
            f"{quant_type} needs an importance matrix: without one two bits per weight are noise; "
            "pass imatrix=, made by quantize.imatrix from the policy's own rollouts"
        )
    if not Path(source).is_file():
        raise QuantisationError(f"there is no GGUF file at {source}; convert the model first")
    matrix = read_imatrix(Path(imatrix)) if imatrix is not None else None
    if matrix is not None:
        _check_fits(matrix, Path(source))
    with replacing(Path(out)) as temporary:
        keys = {**({} if matrix is None else _provenance(matrix)), **_named(name)}
        log = _run(Path(source), temporary, quant_type, matrix, overrides, keys, threads)
    return _with_notes(describe(Path(out)), _fallbacks(log), matrix)


def describe(gguf: Path) -> QuantReport:
    """Types, size and effective bits per weight of a GGUF file, read from the file itself."""
    from gguf import GGUFReader

    tensors = GGUFReader(gguf).tensors
    matrices = [t for t in tensors if is_matrix(t.name, sum(int(n) > 1 for n in t.shape))]
    return QuantReport(
        path=gguf,
        sha256=hash_file(gguf),
        size_bytes=gguf.stat().st_size,
        bits_per_weight=_bits(tensors),
        matrix_bits_per_weight=_bits(matrices),
        tensor_types=dict(sorted(Counter(t.tensor_type.name for t in matrices).items())),
    )


def redescribed(path: Path, like: QuantReport) -> QuantReport:
    """The report of a file made from the one `like` speaks of, with its notes."""
    return replace(describe(path), fallbacks=like.fallbacks, uncovered=like.uncovered)


def _bits(tensors: Sequence[Any]) -> float:
    weights = sum(int(t.n_elements) for t in tensors)
    return 8.0 * sum(int(t.n_bytes) for t in tensors) / weights if weights else 0.0


def _with_notes(
    report: QuantReport, fallbacks: tuple[str, ...], matrix: ImatrixFile | None
) -> QuantReport:
    uncovered: tuple[str, ...] = ()
    if matrix is not None:
        uncovered = tuple(n for n in quantised_tensors(report.path) if n not in matrix.means)
    return replace(report, fallbacks=fallbacks, uncovered=uncovered)


def quantised_tensors(gguf: Path) -> list[str]:
    """Names of the tensors that are no longer floats."""
    from gguf import GGUFReader

    tensors = GGUFReader(gguf).tensors
    return sorted(t.name for t in tensors if t.tensor_type.name not in UNQUANTISED)


def _check_fits(matrix: ImatrixFile, source: Path) -> None:
    """Every block matrix has an entry of its row length: llama.cpp would only warn, or abort."""
    from gguf import GGUFReader

    columns = {
        t.name: int(t.shape[0])
        for t in GGUFReader(source).tensors
        if t.name.startswith("blk.") and is_matrix(t.name, sum(int(n) > 1 for n in t.shape))
    }
    missing = sorted(set(columns) - set(matrix.means))
    if missing:
        raise ImatrixError(
            f"the importance matrix has no entry for {', '.join(missing[:6])} "
            f"({len(missing)} of {len(columns)} matrices); make it from the same model"
        )
    for name, length in columns.items():
        if matrix.means[name].size != length:
            raise ImatrixError(
                f"the importance matrix has {matrix.means[name].size} columns for {name} and the "
                f"model {length}; make it from the same model"
            )


def _run(
    source: Path,
    out: Path,
    quant_type: QuantType,
    matrix: ImatrixFile | None,
    overrides: Sequence[tuple[str, str]],
    keys: Mapping[str, int | str],
    threads: int,
) -> list[str]:
    """Call llama.cpp; returns its log lines."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _FTYPE[quant_type]
    params.nthread = threads
    keep: list[Any] = []  # what C reads must outlive the call
    if matrix is not None:
        params.imatrix = _imatrix_array(matrix, keep)
    if keys:
        params.kv_overrides = _key_array(keys, keep)
    if overrides:
        params.tt_overrides = _override_array(overrides, keep)
    with captured_log() as log:
        answer = llama_cpp.llama_model_quantize(
            str(source).encode(), str(out).encode(), ctypes.byref(params)
        )
    if answer:
        raise QuantisationError(
            f"llama.cpp could not quantise {source.name} to {quant_type}: " + "; ".join(log[-4:])
        )
    return log


def _imatrix_array(matrix: ImatrixFile, keep: list[Any]) -> Any:
    from llama_cpp import llama_model_imatrix_data

    array = (llama_model_imatrix_data * (len(matrix.means) + 1))()
    for entry, (name, values) in zip(array, sorted(matrix.means.items()), strict=False):
        data = np.ascontiguousarray(values, np.float32)
        encoded = name.encode()
        keep += [data, encoded]
        entry.name = encoded
        entry.data = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = data.size
    keep.append(array)
    return array


def _provenance(matrix: ImatrixFile) -> dict[str, int | str]:
    """The keys by which a quantised file says what its importance matrix was made from."""
    return {
        "quantize.imatrix.file": "imatrix.gguf",
        "quantize.imatrix.dataset": matrix.dataset,
        "quantize.imatrix.entries_count": len(matrix.means),
        "quantize.imatrix.chunks_count": matrix.rollouts,
    }


def _named(name: str | None) -> dict[str, int | str]:
    return {} if name is None else {NAME_KEY: name}


def _key_array(values: Mapping[str, int | str], keep: list[Any]) -> Any:
    from llama_cpp import llama_model_kv_override

    array = (llama_model_kv_override * (len(values) + 1))()
    for entry, (key, value) in zip(array, values.items(), strict=False):
        entry.key = key.encode()
        if isinstance(value, int):
            entry.tag = _TAG_INT
            entry.value.val_i64 = value
        else:
            entry.tag = _TAG_STR
            entry.value.val_str = value.encode()[:127]
    keep.append(array)
    return array


def _override_array(overrides: Sequence[tuple[str, str]], keep: list[Any]) -> Any:
    from gguf import GGMLQuantizationType
    from llama_cpp import llama_model_tensor_override

    array = (llama_model_tensor_override * (len(overrides) + 1))()
    for entry, (pattern, type_name) in zip(array, overrides, strict=False):
        if type_name not in GGMLQuantizationType.__members__:
            raise QuantisationError(
                f"override {pattern!r}: {type_name!r} is no GGML type; choose one of "
                f"{', '.join(sorted(GGMLQuantizationType.__members__))}"
            )
        encoded = pattern.encode()
        keep.append(encoded)
        entry.pattern = encoded
        entry.type = int(GGMLQuantizationType[type_name])
    keep.append(array)
    return array


def _fallbacks(log: Sequence[str]) -> tuple[str, ...]:
    """`name: wanted → given` of every tensor whose rows do not fit the wanted type."""
    found = []
    for line in log:
        match = re.search(
            r"(\S+)\s+- ncols\s+(\d+) not divisible by\s+\d+ \(required for type\s+(\S+)\).*"
            r"falling back to\s+(\S+)",
            line,
        )
        if match:
            name, columns, wanted, given = match.groups()
            found.append(f"{name}: rows of {columns}, {wanted} became {given}")
    return tuple(found)
