import pytest

from deployment.jetson.errors import MissingInputError
from deployment.jetson.memory_plan import ModelShape, plan_memory, read_shape, shape_of

MIB = 2**20


def _shape(**changes):
    qwen = {
        "layers": 28,
        "kv_heads": 8,
        "key_length": 128,
        "value_length": 128,
        "hidden": 2048,
        "vocabulary": 151936,
        "trained_context": 40960,
    }
    return ModelShape(**{**qwen, **changes})


def test_kv_cache_of_qwen3_1_7b_is_the_published_448_mib():
    assert plan_memory(_shape(), 0, 4096).kv_cache_bytes == 448 * MIB


def test_compute_buffer_is_a_quarter_of_the_published_300_75_mib_at_512_rows():
    assert plan_memory(_shape(), 0, 4096).compute_bytes * 4 == 300.75 * MIB


def test_total_is_the_sum_of_its_parts():
    plan = plan_memory(_shape(), 1000, 100).as_json()
    total = plan.pop("total_bytes")
    assert total == sum(plan.values())
    assert plan["weights_bytes"] == 1000


def test_short_context_computes_fewer_rows():
    assert plan_memory(_shape(), 0, 32).compute_bytes == 32 * (151936 + 2048) * 4


def test_shape_of_a_real_file(stages):
    shape = read_shape(stages.quantised / "Q8_0.gguf")
    assert shape == ModelShape(2, 2, 16, 16, 64, 320, 256)


def test_defaults_where_a_file_names_no_key_length_or_kv_heads():
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 4,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 8,
        "llama.context_length": 512,
    }
    assert shape_of(metadata, 100) == ModelShape(4, 8, 8, 8, 64, 100, 512)


def test_missing_key_is_named():
    with pytest.raises(MissingInputError, match=r"llama\.attention\.head_count=None"):
        shape_of({"general.architecture": "llama"}, 1)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough"])
def test_file_that_is_no_gguf(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(MissingInputError, match="quantise again"):
        read_shape(tmp_path / "x.gguf")
