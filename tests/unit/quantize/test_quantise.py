"""Quantised files hold what the report says, and the importance matrix is what it should be."""

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from tiny_models import make_model, save

from quantize.convert import convert
from quantize.errors import ImatrixError, QuantisationError
from quantize.imatrix import ImportanceMatrix, collect, read_imatrix, write_imatrix
from quantize.quantise import describe, quantise, quantised_tensors
from tasks.sampling.llama_cpp_context import LlamaCppContext

ROLLOUTS = [[3, 4, 5, 6, 7], [8, 9], [300, 12, 44, 3, 2, 2]]


@pytest.fixture(scope="module")
def imatrix(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    write_imatrix(collect(folders["qwen3"], ROLLOUTS), path, "policy rollouts")
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokenizer):
    """Rows of 96 and 160: no K-quant fits; the folder, its F16 file and importance matrix."""
    root = tmp_path_factory.mktemp("small")
    model = make_model("qwen2", hidden_size=96, intermediate_size=160, tie_word_embeddings=True)
    folder = save(model, tokenizer, root / "hf")
    write_imatrix(collect(folder, ROLLOUTS), root / "imatrix.gguf", "x")
    return convert(folder, root / "F16.gguf").path, root / "imatrix.gguf"


def test_sums_are_the_squares_of_what_goes_into_each_matrix(folders):
    matrix = collect(folders["qwen3"], ROLLOUTS)
    assert len(matrix.sums) == 2 * 7
    assert set(matrix.counts.values()) == {13}
    model = make_model("qwen3")
    total = np.zeros(256)
    with torch.inference_mode():
        for ids in ROLLOUTS:
            hidden = model.model.embed_tokens(torch.tensor([ids]))
            normed = model.model.layers[0].input_layernorm(hidden)[0].double()
            total += (normed**2).sum(0).numpy()
    np.testing.assert_allclose(matrix.sums["blk.0.attn_q.weight"], total, rtol=1e-5)
    np.testing.assert_array_equal(
        matrix.sums["blk.0.attn_q.weight"], matrix.sums["blk.0.attn_v.weight"]
    )
    assert matrix.sums["blk.1.ffn_down.weight"].shape == (512,)


def test_each_rollout_counts_on_its_own(folders):
    together = collect(folders["qwen3"], ROLLOUTS)
    apart = [collect(folders["qwen3"], [ids]) for ids in ROLLOUTS]
    name = "blk.1.ffn_down.weight"
    np.testing.assert_allclose(together.sums[name], sum(a.sums[name] for a in apart), rtol=1e-12)


def test_progress_is_told(folders):
    seen = []
    collect(folders["qwen3"], ROLLOUTS, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("rollouts", [[], [[1], []]])
def test_empty_rollouts_are_refused(rollouts, folders):
    with pytest.raises(ImatrixError):
        collect(folders["qwen3"], rollouts)


def test_a_broken_model_gives_no_matrix(tmp_path, tokenizer):
    model = make_model("qwen2")
    model.model.layers[0].mlp.up_proj.weight.data[:] = float("inf")
    with pytest.raises(ImatrixError, match="not finite"):
        collect(save(model, tokenizer, tmp_path / "hf"), ROLLOUTS)


def test_matrix_survives_the_file(tmp_path):
    matrix = ImportanceMatrix(
        {"blk.0.attn_q.weight": np.array([8.0, 2.0])}, {"blk.0.attn_q.weight": 4}, 2
    )
    write_imatrix(matrix, tmp_path / "m.gguf", "mine")
    back = read_imatrix(tmp_path / "m.gguf")
    np.testing.assert_array_equal(back.means["blk.0.attn_q.weight"], [2.0, 0.5])
    assert (back.dataset, back.rollouts) == ("mine", 2)


def test_no_file_and_no_entries(tmp_path, gguf):
    with pytest.raises(ImatrixError, match="no importance matrix at"):
        read_imatrix(tmp_path / "nowhere.gguf")
    with pytest.raises(ImatrixError, match="no entries"):
        read_imatrix(gguf)


# hidden 256, 4 heads and 2 kv heads of 32, ffn 512, 448 rows, untied: weights in matrices
EMBEDDING, HEAD = 448 * 256, 448 * 256
ATTENTION = 256 * 128 + 2 * 256 * 64 + 128 * 256
FFN = 3 * 256 * 512
WEIGHTS = EMBEDDING + HEAD + 2 * (ATTENTION + FFN)


def test_q8_0_is_eight_and_a_half_bits(gguf, imatrix, tmp_path):
    report = quantise(gguf, tmp_path / "q.gguf", "Q8_0", imatrix)
    assert report.tensor_types == {"Q8_0": 16}
    assert report.matrix_bits_per_weight == pytest.approx(8.5)
    norms = 2 * (256 + 256 + 32 + 32) + 256
    assert report.bits_per_weight == pytest.approx((8.5 * WEIGHTS + 32 * norms) / (WEIGHTS + norms))
    assert report.size_bytes == report.path.stat().st_size
    assert report.uncovered == ("output.weight", "token_embd.weight")
    assert report.fallbacks == ()


def test_q8_0_values_are_within_half_a_step(gguf, tmp_path):
    report = quantise(gguf, tmp_path / "q.gguf", "Q8_0")
    name = "blk.0.ffn_up.weight"
    before = next(t for t in GGUFReader(gguf).tensors if t.name == name)
    after = next(t for t in GGUFReader(report.path).tensors if t.name == name)
    x = np.asarray(before.data, np.float32).reshape(-1, 32)
    y = dequantize(after.data, after.tensor_type).reshape(-1, 32)
    step = np.abs(x).max(1, keepdims=True) / 127
    # half a step, and the float16 scale is off by up to 2⁻¹¹, 127 times over
    assert (np.abs(x - y) <= (0.5 + 127 / 2048) * step + 1e-7).all()


@pytest.mark.parametrize(
    ("quant_type", "bits", "inside"),
    [("Q4_K_M", (4.5, 6.0), "Q4_K"), ("IQ2_M", (2.5, 4.2), "IQ2_S")],
)
def test_low_bit_types_are_what_they_say(quant_type, bits, inside, gguf, imatrix, tmp_path):
    report = quantise(gguf, tmp_path / "q.gguf", quant_type, imatrix)
    assert bits[0] < report.matrix_bits_per_weight < bits[1]
    assert inside in report.tensor_types
    assert sum(report.tensor_types.values()) == 16
    with LlamaCppContext(report.path, parallel_sequences=1, n_ctx_per_seq=32) as context:
        assert next(context.logits_of([[3, 4, 5]])).shape == (3, 448)


def test_iq2_m_without_an_importance_matrix_is_refused(gguf, tmp_path):
    with pytest.raises(ImatrixError, match="IQ2_M needs an importance matrix"):
        quantise(gguf, tmp_path / "q.gguf", "IQ2_M")
    assert list(tmp_path.iterdir()) == []


def test_rows_that_do_not_fit_fall_back_and_are_named(small, tmp_path):
    f16, imatrix = small
    report = quantise(f16, tmp_path / "q.gguf", "IQ2_M", imatrix)
    assert report.tensor_types == {"IQ4_NL": 14, "Q8_0": 1}
    assert report.matrix_bits_per_weight > 4.5  # not the two and a half of the name
    assert len(report.fallbacks) == 14
    assert "blk.0.attn_q.weight: rows of 96, iq2_s became iq4_nl" in report.fallbacks


def test_the_bytes_do_not_depend_on_threads_or_on_when(gguf, imatrix, tmp_path):
    first = quantise(gguf, tmp_path / "a.gguf", "Q4_K_M", imatrix, threads=1)
    second = quantise(gguf, tmp_path / "b.gguf", "Q4_K_M", imatrix, threads=2)
    assert first.sha256 == second.sha256


def test_the_importance_matrix_changes_the_bytes_and_is_recorded(gguf, imatrix, tmp_path):
    without = quantise(gguf, tmp_path / "a.gguf", "Q4_K_M")
    with_it = quantise(gguf, tmp_path / "b.gguf", "Q4_K_M", imatrix)
    assert without.sha256 != with_it.sha256 and without.uncovered == ()
    keys = {n: f.contents() for n, f in GGUFReader(with_it.path).fields.items()}
    assert keys["quantize.imatrix.dataset"] == "policy rollouts"
    assert keys["quantize.imatrix.entries_count"] == 14
    assert keys["quantize.imatrix.chunks_count"] == 3


def test_overrides_win(gguf, imatrix, tmp_path):
    overrides = ((r"blk\.0\.ffn_.*", "Q8_0"), (r"token_embd", "Q6_K"))
    report = quantise(gguf, tmp_path / "q.gguf", "IQ2_M", imatrix, overrides)
    types = {t.name: t.tensor_type.name for t in GGUFReader(report.path).tensors}
    assert types["blk.0.ffn_up.weight"] == types["blk.0.ffn_down.weight"] == "Q8_0"
    assert types["blk.1.ffn_up.weight"] == "IQ2_S"
    assert types["token_embd.weight"] == "Q6_K"


def test_an_unknown_override_type_lists_the_known(gguf, tmp_path):
    with pytest.raises(QuantisationError, match=r"'Q9'.*Q4_K"):
        quantise(gguf, tmp_path / "q.gguf", "Q4_K_M", overrides=(("x", "Q9"),))


def test_a_matrix_of_another_model_is_refused(gguf, small, tmp_path):
    with pytest.raises(ImatrixError, match=r"96 columns for .* and the model 256"):
        quantise(gguf, tmp_path / "q.gguf", "Q4_K_M", small[1])
    partial = tmp_path / "partial.gguf"
    matrix = ImportanceMatrix({"blk.0.attn_q.weight": np.ones(256)}, {"blk.0.attn_q.weight": 1}, 1)
    write_imatrix(matrix, partial, "x")
    with pytest.raises(ImatrixError, match="13 of 14 matrices"):
        quantise(gguf, tmp_path / "q.gguf", "Q4_K_M", partial)


def test_a_file_that_is_no_gguf_fails_with_llama_cpps_words(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    out = tmp_path / "q.gguf"
    out.write_bytes(b"the old one")
    with pytest.raises(QuantisationError, match=r"could not quantise x.gguf"):
        quantise(tmp_path / "x.gguf", out, "Q8_0")
    assert out.read_bytes() == b"the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.gguf", "x.gguf"]


def test_a_missing_source(tmp_path):
    with pytest.raises(QuantisationError, match="no GGUF file at"):
        quantise(tmp_path / "x.gguf", tmp_path / "q.gguf", "Q8_0")


def test_describe_reads_the_float_file(gguf):
    report = describe(gguf)
    assert report.tensor_types == {"F16": 16}
    assert report.matrix_bits_per_weight == 16.0
    assert quantised_tensors(gguf) == []
