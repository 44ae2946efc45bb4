import pytest

from deployment.jetson.errors import MissingInputError
from deployment.jetson.measurement import measure, read_report, reported_buffers
from deployment.jetson.memory_plan import Serving
from deployment.jetson.model_facts import model_facts

LOG = [
    "llama_context:        CPU  output buffer size =     0.50 MiB",
    "llama_kv_cache:        CPU KV buffer size =     1.00 MiB",
    "llama_kv_cache:      CUDA0 KV buffer size =     2.00 MiB",
    "sched_reserve:        CPU compute buffer size =     3.25 MiB",
    "~llama_context:        CPU compute buffer size is   3.2500 MiB, matches expectation",
]


def test_report_sums_buffers_of_the_same_use():
    assert read_report(LOG) == {
        "kv_cache_bytes": 3 << 20,
        "output_bytes": 1 << 19,
        "compute_bytes": 3407872,
    }


def test_log_of_another_llama_cpp_is_an_error():
    with pytest.raises(MissingInputError, match="no compute_bytes"):
        read_report(LOG[:-1])


def test_measured_in_a_process_of_its_own(stages):
    path = stages.quantised / "Q8_0.gguf"
    found = measure(path, Serving(256))
    assert found["buffers"] == reported_buffers(path, Serving(256))
    assert found["prompt_tokens_per_s"] > found["decode_tokens_per_s"] > 0
    assert found["resident_bytes"] >= path.stat().st_size // 2
    assert "CPU" in found["where"] and found["threads"] == 1


def test_file_that_llama_cpp_refuses(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF no")
    with pytest.raises(MissingInputError, match=r"measuring .* failed"):
        measure(tmp_path / "x.gguf", Serving(256))
    with pytest.raises(MissingInputError, match="cannot load"):
        reported_buffers(tmp_path / "x.gguf", Serving(256))


def test_facts_of_a_model_are_the_same_twice_and_agree_with_llama_cpp(stages):
    path = stages.quantised / "Q8_0.gguf"
    facts = model_facts(path, "Q8_0", 256)
    assert facts == model_facts(path, "Q8_0", 256)
    assert facts["predicted"]["file_bytes"] == pytest.approx(path.stat().st_size, rel=0.02)
    assert model_facts(path, "IQ2_M+3", 256)["predicted"]["file_bytes"] is None
    modes = facts["predicted"]["tokens_per_s"]
    assert set(modes) == {"7W", "15W", "25W", "MAXN_SUPER"}
    assert modes["15W"]["bound"] > modes["15W"]["expected"][1] > modes["15W"]["expected"][0]
