"""How fast tokens can come at best: every one of them reads the weights and the cache once.

Bound = bandwidth / bytes read. What is expected lies under it: published runs on this device reach
16 % (135 M) to 87 % (8 B) of the bound; read as a share of the bandwidth plus a fixed time for a
token, t = bytes / (0.8 · bandwidth) + t0 with t0 of 5 to 13 ms covers them. The two ends are given;
neither is a promise, and a device's own measurement replaces both.
"""

from dataclasses import dataclass

from deployment.jetson.device import Device, PowerMode
from deployment.jetson.file_size import FileSize
from deployment.jetson.memory_plan import KvType, kv_bytes_per_token
from deployment.jetson.model_shape import ModelShape

SHARE_OF_BANDWIDTH = 0.8
OVERHEAD_S = (0.005, 0.013)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one sequence in one power mode."""

    mode: str
    bandwidth: float
    """Bytes per second."""
    bytes_per_token: int
    bound: float
    expected_low: float
    expected_high: float


def bytes_per_token(shape: ModelShape, file: FileSize, cached: int, kv_type: KvType = "F16") -> int:
    """Bytes read for one token with `cached` tokens in the cache.

    Of an embedding that is not the output matrix too, one row is read: nothing beside the rest.
    """
    weights = file.data_bytes - (0 if shape.tied else file.embedding_bytes)
    return weights + int(kv_bytes_per_token(shape, kv_type) * cached)


def speed(mode: PowerMode, read_bytes: int) -> Speed:
    """The bound, and the two ends of what is expected."""
    slow, fast = (1 / (read_bytes / (SHARE_OF_BANDWIDTH * mode.bandwidth) + t) for t in
                  reversed(OVERHEAD_S))  # fmt: skip
    return Speed(mode.name, mode.bandwidth, read_bytes, mode.bandwidth / read_bytes, slow, fast)


def speeds(
    device: Device, shape: ModelShape, file: FileSize, cached: int, kv_type: KvType = "F16"
) -> list[Speed]:
    """One for each power mode, slowest first."""
    read_bytes = bytes_per_token(shape, file, cached, kv_type)
    return [speed(mode, read_bytes) for mode in device.modes]
