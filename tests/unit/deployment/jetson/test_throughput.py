import pytest

from deployment.jetson.device import PowerMode, find_device
from deployment.jetson.errors import UnknownDeviceError
from deployment.jetson.file_size import FileSize, predict_file
from deployment.jetson.model_shape import known_shape
from deployment.jetson.throughput import bytes_per_token, speed, speeds

ORIN = find_device("orin-nano-8gb")


def test_bound_and_expectation_by_hand():
    """1 GB a token at 100 GB/s: 100 tok/s at best; 12.5 ms at 80 %, plus 5 to 13 ms."""
    found = speed(PowerMode("x", 100e9), 10**9)
    assert found.bound == 100
    assert found.expected_high == pytest.approx(1 / 0.0175)
    assert found.expected_low == pytest.approx(1 / 0.0255)


def test_untied_embedding_is_not_read():
    file = FileSize(file_bytes=1100, data_bytes=1000, embedding_bytes=300, bits_per_weight=4)
    tied, untied = known_shape("qwen3-1.7b"), known_shape("qwen3-8b")
    assert bytes_per_token(tied, file, 0) == 1000
    assert bytes_per_token(untied, file, 0) == 700
    assert bytes_per_token(untied, file, 10) == 700 + 10 * 144 * 1024


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("qwen2.5-1.5b", 69, 104), ("qwen2.5-3b", 35, 53), ("qwen2.5-7b", 15.6, 23.4)],
)
def test_bounds_of_real_models_with_an_empty_cache(name, low, high):
    """Worked out from the published file sizes at 68 and 102 GB/s."""
    of = known_shape(name)
    found = {s.mode: s.bound for s in speeds(ORIN, of, predict_file(of, "Q4_K_M"), 0)}
    assert found["15W"] == pytest.approx(low, rel=0.03)
    assert found["MAXN_SUPER"] == pytest.approx(high, rel=0.03)
    assert (found["7W"], found["25W"]) == (found["15W"], found["MAXN_SUPER"])


# published on this device, tok/s (NVIDIA, 4-bit, original clocks and Super)
MEASURED = {"llama-3.1-8b": (14.0, 19.1), "llama-3.2-3b": (27.7, 43.1), "qwen2.5-7b": (14.2, 21.8)}


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_what_was_measured_lies_under_the_bound(name):
    of = known_shape(name)
    found = {s.mode: s.bound for s in speeds(ORIN, of, predict_file(of, "Q4_K_M"), 0)}
    for mode, measured in zip(("15W", "MAXN_SUPER"), MEASURED[name], strict=True):
        assert 0.6 * found[mode] < measured < found[mode]


def test_unknown_device_is_named():
    with pytest.raises(UnknownDeviceError, match="orin-nano-8gb"):
        find_device("nano")
