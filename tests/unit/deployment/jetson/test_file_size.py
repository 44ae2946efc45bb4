"""Predicted files against files that llama.cpp really wrote."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from random_gguf import SHAPES, shape, write_gguf

from deployment.jetson.file_size import (
    BLOCKS,
    FILE_TYPES,
    Tensor,
    measured_file,
    predict_file,
    tensor_bytes,
    tensor_type,
    tensors_of,
)
from deployment.jetson.model_shape import known_shape, read_shape
from quantize.imatrix import ImportanceMatrix, write_imatrix
from quantize.quantise import quantise

TOLERANCE = 0.02
GIB = 2**30


def _imatrix(path, of):
    """One of equal weights: sizes do not depend on it."""
    blocks = [t for t in tensors_of(of) if t.name.startswith("blk.") and t.dimensions == 2]
    sums = {t.name: np.ones(t.columns) for t in blocks}
    write_imatrix(ImportanceMatrix(sums, dict.fromkeys(sums, 1), 1), path, "ones")
    return path


@pytest.fixture(scope="module", params=sorted(SHAPES))
def source(request, tmp_path_factory):
    """(shape as read back, F16 file, folder)."""
    folder = tmp_path_factory.mktemp("sizes")
    path = write_gguf(folder / "F16.gguf", shape(request.param))
    return read_shape(path), path, folder


def test_predicted_size_and_types_are_llama_cpps(source):
    """Every type of every shape: the file within 2 %, and each tensor's type exactly."""
    of, f16, folder = source
    imatrix = _imatrix(folder / "imatrix.gguf", of)
    for kind in FILE_TYPES:
        path = f16
        if kind != "F16":
            path = folder / f"{kind}.gguf"
            quantise(f16, path, kind, imatrix if kind == "IQ2_M" else None)
        found = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
        wanted = {t.name: tensor_type(t, of, kind) for t in tensors_of(of)}
        assert found == wanted, kind
        predicted, measured = predict_file(of, kind), measured_file(path)
        error = abs(predicted.file_bytes / measured.file_bytes - 1)
        assert error <= TOLERANCE, f"{kind}: {predicted.file_bytes} against {measured.file_bytes}"
        assert predicted.data_bytes == measured.data_bytes
        assert predicted.embedding_bytes == measured.embedding_bytes
        assert predicted.bits_per_weight == pytest.approx(measured.bits_per_weight)


def test_blocks_are_ggufs():
    for name, block in BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == block


@pytest.mark.parametrize(
    ("kind", "columns", "size"),
    [
        ("F16", 3, 2 * 3 * 2),
        ("Q8_0", 64, 2 * 2 * 34),
        ("Q4_K", 512, 2 * 2 * 144),
        ("Q4_K", 1, 2 * 144),
    ],
)
def test_bytes_of_two_rows(kind, columns, size):
    assert tensor_bytes(Tensor("x", 2, columns), kind) == size


# published sizes of real files, GiB (llama.cpp's and the models' own pages)
PUBLISHED = {
    ("llama-3.1-8b", "Q8_0"): 7.95,
    ("llama-3.1-8b", "Q5_K_M"): 5.33,
    ("llama-3.1-8b", "Q4_K_M"): 4.58,
    ("llama-3.1-8b", "IQ2_M"): 2.74,
    ("qwen2.5-0.5b", "Q4_K_M"): 0.37,
    ("qwen3-4b", "Q4_K_M"): 2.33,
    ("qwen3-8b", "Q4_K_M"): 4.68,
}


@pytest.mark.parametrize(("model", "kind"), sorted(PUBLISHED))
def test_published_files_of_real_models(model, kind):
    predicted = predict_file(known_shape(model), kind).file_bytes / GIB
    assert predicted == pytest.approx(PUBLISHED[model, kind], rel=0.015, abs=0.006)


def test_small_models_do_not_get_the_bits_their_type_promises():
    """Rows of 896 are no multiple of 256: "IQ2_M" of Qwen2.5-0.5B is a five-bit file."""
    assert 5.0 < predict_file(known_shape("qwen2.5-0.5b"), "IQ2_M").bits_per_weight < 5.4
    assert 2.8 < predict_file(known_shape("qwen2.5-7b"), "IQ2_M").bits_per_weight < 3.0


def test_tied_embedding_is_quantised_as_the_output():
    tied = shape("qwen3 tied, heads wider than hidden")
    untied = shape("llama untied, every head its own")
    embedding = Tensor("token_embd.weight", 8, 256)
    types = [tensor_type(embedding, of, "Q4_K_M") for of in (tied, untied)]
    assert types == ["Q6_K", "Q4_K"]


def test_sizes_fall_from_type_to_type():
    of = known_shape("qwen2.5-3b")
    sizes = [predict_file(of, kind).file_bytes for kind in FILE_TYPES]
    assert sizes == sorted(sizes, reverse=True)
