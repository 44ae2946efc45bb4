"""Own rollouts against generic text and none: which rows there are, and what they say."""

import numpy as np
import pytest

from quantize.divergence import against
from quantize.imatrix import collect, read_imatrix, write_imatrix
from quantize.imatrix_compare import compare_matrices, generic_matrix, own_matrix
from quantize.parity import summarise
from quantize.quantise import quantise
from quantize.rollouts import RolloutTokens


def rollouts(seed, count=6):
    rng = np.random.default_rng(seed)
    return [
        RolloutTokens(tuple(rng.integers(3, 390, 24).tolist()), tuple(i > 6 for i in range(24)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def made(gguf, folders, tmp_path_factory):
    """F16 and own files of three types in a folder of their own."""
    root = tmp_path_factory.mktemp("made")
    f16 = root / "F16.gguf"
    f16.write_bytes(gguf.read_bytes())
    write_imatrix(own_matrix(folders["qwen3"], rollouts(0), "all"), root / "imatrix.gguf", "own")
    types = ("Q8_0", "Q4_K_M", "IQ2_M")
    own = {t: quantise(f16, root / f"{t}.gguf", t, root / "imatrix.gguf").path for t in types}
    return f16, own


@pytest.fixture(scope="module")
def found(made, folders):
    f16, own = made
    return compare_matrices(folders["qwen3"], f16, own, 144, rollouts(1), context_length=64)


def test_every_type_that_uses_a_matrix_is_compared_with_what_it_can_do_without(found):
    assert [(r["type"], r["matrix"]) for r in found["rows"]] == [
        ("Q4_K_M", "own rollouts"),
        ("Q4_K_M", "generic text"),
        ("Q4_K_M", "none"),
        ("IQ2_M", "own rollouts"),
        ("IQ2_M", "generic text"),  # and never without one
    ]
    assert found["text"].startswith("Python ") and len(found["text_matrix_sha256"]) == 64


def test_the_figures_are_those_of_the_files(found, made, tmp_path):
    f16, own = made
    none = quantise(f16, tmp_path / "none.gguf", "Q4_K_M").path
    scored = against(f16, {"own": own["Q4_K_M"], "none": none}, rollouts(1), 1)
    rows = {r["matrix"]: r for r in found["rows"] if r["type"] == "Q4_K_M"}
    assert rows["own rollouts"]["kl"]["value"] == summarise(scored["own"]).kld.value
    assert rows["none"]["kl"]["value"] == summarise(scored["none"]).kld.value
    difference = rows["none"]["own_minus_this"]
    expected = sum(a.kl - b.kl for a, b in zip(*scored.values(), strict=True)) / (6 * 17)
    assert difference["value"] == pytest.approx(expected)
    assert difference["ci95"][0] <= difference["value"] <= difference["ci95"][1]
    assert "own_minus_this" not in rows["own rollouts"]


def test_nothing_stays_behind_and_own_files_stay(found, made):
    f16, own = made
    names = {p.name for p in f16.parent.iterdir()}
    assert names == {"F16.gguf", "imatrix.gguf", *(p.name for p in own.values())}


def test_where_no_type_uses_a_matrix_nothing_is_made(made, folders):
    f16, own = made
    only = {"Q8_0": own["Q8_0"]}
    got = compare_matrices(folders["qwen3"], f16, only, 144, rollouts(1), context_length=64)
    assert got == {"rows": [], "text": None}


def test_weights_choose_how_tokens_count(folders):
    folder, name = folders["qwen3"], "blk.0.attn_q.weight"
    some = rollouts(0, 2)
    even = own_matrix(folder, some, "all")
    spoken = own_matrix(folder, some, "assistant")
    assert even.counts[name] == 48 and spoken.counts[name] == 2 * 17
    np.testing.assert_array_equal(
        even.sums[name], collect(folder, [r.token_ids for r in some]).sums[name]
    )
    by_gradient = own_matrix(folder, some, "gradient").means()[name]
    assert not np.allclose(by_gradient, even.means()[name], rtol=0.01)


def test_generic_text_gives_as_many_tokens_as_asked_in_stretches_that_fit(folders, tmp_path):
    matrix, origin = generic_matrix(folders["qwen3"], 100, 32)
    assert (matrix.rollouts, set(matrix.counts.values())) == (4, {128})
    write_imatrix(matrix, tmp_path / "m.gguf", origin)
    assert read_imatrix(tmp_path / "m.gguf").dataset == origin
