"""Files put together from others are those that llama.cpp makes with overrides."""

import pytest
from gguf import GGUFReader
from tiny_models import make_model, save

from quantize.convert import convert
from quantize.errors import QuantisationError
from quantize.imatrix import collect, write_imatrix
from quantize.quantise import quantise
from quantize.splice import same_tensors, splice

RAISED = ("blk.1.attn_q.weight", "token_embd.weight")


@pytest.fixture(scope="module")
def made(folders, gguf, ids, tmp_path_factory):
    """F16, an importance matrix, Q4_K_M, and all matrices as Q6_K."""
    folder = tmp_path_factory.mktemp("splice")
    write_imatrix(collect(folders["qwen3"], [ids]), folder / "imatrix.gguf", "test")
    quantise(gguf, folder / "q4.gguf", "Q4_K_M", folder / "imatrix.gguf")
    quantise(gguf, folder / "q6.gguf", "Q8_0", folder / "imatrix.gguf", [(".*", "Q6_K")])
    return folder


def test_the_bytes_are_those_of_overrides(made, gguf, tmp_path):
    overrides = [(f"^{name}$", kind) for name, kind in zip(RAISED, ("Q6_K", "F16"), strict=True)]
    quantise(gguf, tmp_path / "real.gguf", "Q4_K_M", made / "imatrix.gguf", overrides)
    donors = dict(zip(RAISED, (made / "q6.gguf", gguf), strict=True))
    splice(made / "q4.gguf", tmp_path / "mine.gguf", donors)
    assert (tmp_path / "mine.gguf").read_bytes() == (tmp_path / "real.gguf").read_bytes()


def test_no_donors_is_a_copy(made, tmp_path):
    splice(made / "q4.gguf", tmp_path / "same.gguf", {})
    assert (tmp_path / "same.gguf").read_bytes() == (made / "q4.gguf").read_bytes()


def test_only_what_is_named_changes(made, tmp_path):
    splice(made / "q4.gguf", tmp_path / "x.gguf", {RAISED[0]: made / "q6.gguf"})
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "x.gguf").tensors}
    before = {t.name: t.tensor_type.name for t in GGUFReader(made / "q4.gguf").tensors}
    before[RAISED[0]] = "Q6_K"
    assert types == before
    assert not same_tensors(tmp_path / "x.gguf", made / "q4.gguf")
    assert same_tensors(tmp_path / "x.gguf", tmp_path / "x.gguf")


def test_an_unknown_tensor(made, tmp_path):
    with pytest.raises(QuantisationError, match=r"q4.gguf holds no tensor blk.9.x"):
        splice(made / "q4.gguf", tmp_path / "x.gguf", {"blk.9.x": made / "q6.gguf"})
    assert list(tmp_path.iterdir()) == []


def test_a_donor_of_another_model(made, tokenizer, tmp_path):
    model = make_model("qwen3", num_attention_heads=2)
    other = convert(save(model, tokenizer, tmp_path / "hf"), tmp_path / "other.gguf").path
    with pytest.raises(QuantisationError, match=r"attn_q.weight with shape .*256, 64"):
        splice(made / "q4.gguf", tmp_path / "x.gguf", {RAISED[0]: other})
    assert not (tmp_path / "x.gguf").exists()
