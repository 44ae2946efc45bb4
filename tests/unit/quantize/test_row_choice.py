"""Rows chosen by their output error: against an enumeration, and on a file llama.cpp reads."""

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from quantize.errors import QuantisationError
from quantize.imatrix import collect, read_imatrix, write_imatrix
from quantize.moments import collect_moments
from quantize.quantise import quantise
from quantize.row_choice import POWERS, choose_rows, powered, quantise_by_rows, weighing_name
from tasks.sampling.llama_cpp_context import LlamaCppContext

MATRIX = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def made(folders, gguf, ids, tmp_path_factory):
    """An importance matrix, moments, and two roundings of one model."""
    folder = tmp_path_factory.mktemp("rows")
    imatrix = folder / "imatrix.gguf"
    write_imatrix(collect(folders["qwen3"], [ids]), imatrix, "test")
    files = {
        "matrix": quantise(gguf, folder / "matrix.gguf", "Q4_K_M", imatrix).path,
        "none": quantise(gguf, folder / "none.gguf", "Q4_K_M").path,
    }
    return imatrix, collect_moments(folders["qwen3"], [ids]), files


def tensors(path) -> dict:
    return {t.name: t for t in GGUFReader(path).tensors}


def test_every_row_is_the_better_of_two(made, gguf, tmp_path):
    _, moments, files = made
    choice = choose_rows(gguf, files, moments, tmp_path / "out.gguf")
    exact, first, second = (tensors(p) for p in (gguf, *files.values()))
    mine = tensors(tmp_path / "out.gguf")
    assert list(mine) == list(first)
    kept = {"matrix": 0, "none": 0}
    for name, square in moments.items():
        weights = dequantize(exact[name].data, exact[name].tensor_type).astype(float)
        for row in range(len(weights)):
            errors = []
            for file in (first, second):
                delta = dequantize(file[name].data, file[name].tensor_type)[row] - weights[row]
                errors.append(delta @ square @ delta)
            best = int(np.argmin(errors))
            kept[("matrix", "none")[best]] += 1
            np.testing.assert_array_equal(
                mine[name].data[row], (first, second)[best][name].data[row]
            )
    assert choice.kept == kept and min(kept.values()) > 0
    assert 0 < choice.error_ratio < 1


def test_tensors_without_moments_and_keys_are_those_of_the_first(made, gguf, tmp_path):
    _, moments, files = made
    one = {MATRIX: moments[MATRIX]}
    choose_rows(gguf, files, one, tmp_path / "out.gguf")
    mine, first = tensors(tmp_path / "out.gguf"), tensors(files["matrix"])
    changed = [n for n in mine if not np.array_equal(mine[n].data, first[n].data)]
    assert changed == [MATRIX]
    assert list(GGUFReader(tmp_path / "out.gguf").fields) == list(
        GGUFReader(files["matrix"]).fields
    )


def test_one_file_is_a_copy(made, gguf, tmp_path):
    _, moments, files = made
    only = {"matrix": files["matrix"]}
    assert choose_rows(gguf, only, moments, tmp_path / "out.gguf").error_ratio == 1
    assert (tmp_path / "out.gguf").read_bytes() == files["matrix"].read_bytes()


def test_a_weighing_is_a_power_of_the_mean_square(made):
    imatrix, _, _ = made
    matrix = read_imatrix(imatrix)
    assert [weighing_name(p) for p in POWERS] == ["x^2", "x^1.5", "x^1", "x^0", "x^3"]
    means = matrix.means[MATRIX].astype(float)
    np.testing.assert_allclose(powered(matrix, 0.5).sums[MATRIX], np.sqrt(means), rtol=1e-6)
    np.testing.assert_allclose(powered(matrix, 0.0).sums[MATRIX], np.ones(len(means)))


@pytest.mark.parametrize("quant_type", ["Q4_K_M", "IQ2_M"])
def test_the_file_is_of_its_type_and_can_be_run(quant_type, made, gguf, ids, tmp_path):
    imatrix, moments, _ = made
    report, choice = quantise_by_rows(gguf, tmp_path / "out.gguf", quant_type, imatrix, moments)
    plain = quantise(gguf, tmp_path / "plain.gguf", quant_type, imatrix)
    assert (report.tensor_types, report.size_bytes) == (plain.tensor_types, plain.size_bytes)
    assert report.sha256 != plain.sha256
    assert (report.fallbacks, report.uncovered) == (plain.fallbacks, plain.uncovered)
    assert choice.error_ratio < 1 and ("none" in choice.kept) == (quant_type == "Q4_K_M")
    again, _ = quantise_by_rows(gguf, tmp_path / "again.gguf", quant_type, imatrix, moments)
    assert again.sha256 == report.sha256
    with LlamaCppContext(tmp_path / "out.gguf", parallel_sequences=1, n_ctx_per_seq=64) as context:
        assert np.isfinite(next(iter(context.logits_of([ids])))).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.gguf", "out.gguf", "plain.gguf"]


def test_what_does_not_fit(made, gguf, tmp_path):
    imatrix, moments, files = made
    with pytest.raises(QuantisationError, match=r"blk.0.attn_q.weight: moments of shape \(3, 3\)"):
        choose_rows(gguf, files, {MATRIX: np.eye(3)}, tmp_path / "x.gguf")
    other = quantise(gguf, tmp_path / "q5.gguf", "Q5_K_M", imatrix).path
    with pytest.raises(QuantisationError, match="the files are not of one recipe"):
        choose_rows(gguf, {**files, "other": other}, moments, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
