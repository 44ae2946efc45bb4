"""The policy's own rollouts against generic text, and against no importance matrix at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from configs.schema.quantize import QuantType
from quantize.divergence import against, wanted_rows
from quantize.generic_text import CHUNK, chunks, describe_text, generic_text
from quantize.imatrix import ImportanceMatrix, collect, write_imatrix
from quantize.imatrix_gradient import collect_by_gradient
from quantize.parity import SequenceParity, kl_difference, summarise
from quantize.quantise import NEEDS_IMATRIX, quantise
from quantize.rollouts import RolloutTokens
from tasks.artifacts.bootstrap import Interval
from tasks.artifacts.content_hash import hash_file
from tasks.models.load import load_tokenizer

Weights = Literal["gradient", "all", "assistant"]

OWN, GENERIC, NONE = "own rollouts", "generic text", "none"
USES_IMATRIX: tuple[QuantType, ...] = ("Q5_K_M", "Q4_K_M", "IQ2_M")
"""Types whose bytes depend on a matrix; Q8_0 rounds every weight by itself."""


def own_matrix(
    model_dir: Path, rollouts: Sequence[RolloutTokens], weights: Weights
) -> ImportanceMatrix:
    """The matrix of the policy's own rollouts.

    Raises:
        ImatrixError: rollouts that give none.
    """
    if weights == "gradient":
        return collect_by_gradient(model_dir, rollouts)
    counted = wanted_rows(rollouts) if weights == "assistant" else None
    return collect(model_dir, [r.token_ids for r in rollouts], counted=counted)


def generic_matrix(
    model_dir: Path, tokens: int, context_length: int
) -> tuple[ImportanceMatrix, str]:
    """A matrix of at least `tokens` tokens of generic text, as llama.cpp's tool makes one; and
    where the text comes from.

    Raises:
        GenericTextError: there is none on this machine, or too little.
    """
    tokenizer = load_tokenizer(model_dir)
    text = generic_text()

    def encode(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])

    stretches = chunks(encode, text, tokens, min(CHUNK, context_length))
    return collect(model_dir, stretches), describe_text(text)


def compare_matrices(
    model_dir: Path,
    f16: Path,
    own: Mapping[QuantType, Path],
    matrix_tokens: int,
    heldout: Sequence[RolloutTokens],
    *,
    context_length: int,
    threads: int = 1,
) -> dict[str, Any]:
    """KL to F16 on held-out rollouts, by type and matrix, as plain JSON data.

    `own` are files made with the policy's own matrix. Each row has `type`, `matrix`, `kl` and,
    except for the own matrix, `own_minus_this`: the paired difference, below 0 where the own one
    lies nearer to F16.

    Raises:
        QuantizeError: a matrix or a file could not be made.
    """
    types = [t for t in USES_IMATRIX if t in own]
    if not types:
        return {"rows": [], "text": None}
    matrix, origin = generic_matrix(model_dir, matrix_tokens, context_length)
    with TemporaryDirectory(prefix=".matrices-", dir=f16.parent) as temporary:
        folder = Path(temporary)
        generic = folder / "generic.imatrix.gguf"
        write_imatrix(matrix, generic, origin)
        rows = [
            row
            for quant_type in types
            for row in _rows(quant_type, f16, own[quant_type], generic, heldout, threads)
        ]
        return {"rows": rows, "text": origin, "text_matrix_sha256": hash_file(generic)}


def _rows(
    quant_type: QuantType,
    f16: Path,
    own: Path,
    generic: Path,
    heldout: Sequence[RolloutTokens],
    threads: int,
) -> list[dict[str, Any]]:
    """One type with each matrix; the files made for it go again."""
    files = {OWN: own}
    for name, matrix in ((GENERIC, generic), (NONE, None)):
        if matrix is not None or quant_type not in NEEDS_IMATRIX:
            path = generic.with_name(f"{quant_type}-{name.split()[0]}.gguf")
            files[name] = quantise(f16, path, quant_type, matrix, threads=threads).path
    scored = against(f16, files, heldout, threads)
    rows = [_row(quant_type, name, scored[name], scored[OWN]) for name in files]
    for name, path in files.items():
        if name != OWN:
            path.unlink()
    return rows


def _row(
    quant_type: QuantType,
    matrix: str,
    scored: Sequence[SequenceParity],
    own: Sequence[SequenceParity],
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "type": quant_type,
        "matrix": matrix,
        "kl": _interval(summarise(scored).kld),
    }
    if matrix != OWN:
        row["own_minus_this"] = _interval(kl_difference(own, scored))
    return row


def _interval(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "ci95": [interval.low, interval.high]}
