import pytest

from deployment.jetson.errors import ServingError
from deployment.jetson.file_size import predict_file
from deployment.jetson.memory_plan import (
    CUDA_CONTEXT_BYTES,
    Serving,
    kv_bytes_per_token,
    longest_context,
    plan_memory,
    remedies,
)
from deployment.jetson.model_shape import known_shape

MIB = 2**20
QWEN = known_shape("qwen3-1.7b")
FILE = predict_file(QWEN, "Q4_K_M")


def test_kv_cache_of_qwen3_1_7b_is_the_published_448_mib():
    assert plan_memory(QWEN, FILE, Serving(4096)).kv_cache_bytes == 448 * MIB
    eight = Serving(4096, kv_type="Q8_0", flash_attention=True)
    assert plan_memory(QWEN, FILE, eight).kv_cache_bytes == 448 * MIB * 34 // 64


@pytest.mark.parametrize(
    ("name", "kib"),
    [("qwen2.5-0.5b", 12), ("qwen2.5-3b", 36), ("qwen2.5-7b", 56), ("qwen3-8b", 144)],
)
def test_kv_cache_of_a_token(name, kib):
    assert kv_bytes_per_token(known_shape(name)) == kib * 1024


def test_total_is_the_sum_of_its_parts():
    plan = plan_memory(QWEN, FILE, Serving(4096)).as_json()
    total = plan.pop("total_bytes")
    assert total == sum(plan.values())
    assert plan["weights_bytes"] == FILE.data_bytes
    assert plan["output_bytes"] == 151936 * 4


def test_gpu_holds_a_tied_embedding_twice_and_a_cuda_context():
    on_gpu, on_cpu = (plan_memory(QWEN, FILE, Serving(512, gpu=gpu)) for gpu in (True, False))
    assert on_gpu.embedding_copy_bytes == FILE.embedding_bytes > 0
    assert on_cpu.embedding_copy_bytes == on_cpu.cuda_context_bytes == 0
    assert on_gpu.total_bytes - on_cpu.total_bytes == FILE.embedding_bytes + CUDA_CONTEXT_BYTES
    untied = known_shape("qwen3-8b")
    plan = plan_memory(untied, predict_file(untied, "Q4_K_M"), Serving(512))
    assert plan.embedding_copy_bytes == 0


@pytest.mark.parametrize(
    ("serving", "match"),
    [
        (Serving(0), "context=0"),
        (Serving(512, slots=0), "slots=0"),
        (Serving(512, slots=257), "slots=257"),
        (Serving(4, slots=5), "slots=5 of a context of 4"),
        (Serving(512, ubatch=-1), "ubatch=-1"),
        (Serving(512, kv_type="Q4_0"), "kv_type=Q4_0"),
        (Serving(512, kv_type="Q8_0"), "flash attention only"),
    ],
)
def test_what_cannot_be_served_is_named(serving, match):
    with pytest.raises(ServingError, match=match):
        plan_memory(QWEN, FILE, serving)


def test_each_remedy_frees_what_it_says():
    """Every figure again, by planning the changed serving from scratch."""
    serving = Serving(8192, slots=4, ubatch=512)
    before = plan_memory(QWEN, FILE, serving).total_bytes
    found = {r.change: r for r in remedies(QWEN, FILE, serving, before - 1, file_type="Q4_K_M")}
    context = plan_memory(QWEN, FILE, Serving(4096, slots=4, ubatch=512)).total_bytes
    assert found["context 8192 → 4096"].frees_bytes == before - context
    assert found["slots 4 → 1, of 2048 tokens"].frees_bytes >= 112 * 2048 * 3 * 1024
    assert found["ubatch 512 → 128"].frees_bytes > 200 * MIB
    smaller = plan_memory(QWEN, predict_file(QWEN, "IQ2_M"), serving).total_bytes
    assert found["type IQ2_M"].frees_bytes == before - smaller
    assert set(found) & {"type Q8_0", "type Q4_K_M", "type F16"} == set()
    assert all(remedy.enough for remedy in found.values())  # one byte was missing


def test_enough_is_judged_to_the_byte():
    need = plan_memory(QWEN, FILE, Serving(512)).total_bytes
    exact = remedies(QWEN, FILE, Serving(512), need - 100, headless_bytes=100)
    short = remedies(QWEN, FILE, Serving(512), need - 101, headless_bytes=100)
    assert exact[0].change.startswith("headless") and exact[0].enough
    assert not short[0].enough


def test_where_no_change_is_enough_several_together_are_tried():
    big = known_shape("qwen3-8b")
    file, serving = predict_file(big, "Q4_K_M"), Serving(4096, slots=2)
    need = plan_memory(big, file, serving).total_bytes
    available = need - 900 * MIB
    found = remedies(big, file, serving, available, file_type="Q4_K_M", headless_bytes=600 * MIB)
    together = next(r for r in found if " + " in r.change)
    assert together.enough and together.frees_bytes >= 900 * MIB
    assert "headless mode + ubatch 128 → 64" in together.change
    hopeless = remedies(big, file, serving, 1, file_type="Q4_K_M")
    assert not any(r.enough for r in hopeless)


def test_nothing_is_proposed_that_frees_nothing():
    tight = Serving(256, ubatch=32, kv_type="Q8_0", flash_attention=True)
    found = remedies(QWEN, predict_file(QWEN, "IQ2_M"), tight, 1, file_type="IQ2_M")
    assert found == []


def test_longest_context_fits_and_the_next_step_does_not():
    available = 3 << 30
    longest = longest_context(QWEN, FILE, Serving(256), available)
    assert longest % 256 == 0
    assert plan_memory(QWEN, FILE, Serving(longest)).total_bytes <= available
    assert plan_memory(QWEN, FILE, Serving(longest + 256)).total_bytes > available
    assert longest_context(QWEN, FILE, Serving(256), 1) == 0
    assert longest_context(QWEN, FILE, Serving(256), 1 << 50) == 40960  # trained for no more
