"""The devices a plan can be made for: memory, and what each power mode lets through.

Sources: NVIDIA's data sheets for the memory bandwidth (68 GB/s at the original 15 W and 7 W modes,
102 GB/s from the Super modes on); a published reading of MemAvailable on an Orin Nano 8 GB with the
desktop running (about 5.2 GB) and NVIDIA's own figure for what leaving the desktop frees (up to
865 MB). Your device's own MemAvailable is better than both: give it with `--available`.
"""

from dataclasses import dataclass

from deployment.jetson.errors import UnknownDeviceError


@dataclass(frozen=True)
class PowerMode:
    """One mode of `nvpmodel`, and the memory bandwidth it allows, bytes per second."""

    name: str
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a device; bytes."""

    name: str
    total_bytes: int
    """Memory shared by CPU and GPU."""
    available_bytes: int
    """MemAvailable after start, with the desktop."""
    headless_bytes: int
    """What leaving the desktop frees, at most."""
    modes: tuple[PowerMode, ...]


_SUPER = tuple(
    PowerMode(name, bandwidth)
    for name, bandwidth in (
        ("7W", 68e9),
        ("15W", 68e9),
        ("25W", 102e9),
        ("MAXN_SUPER", 102e9),
    )
)
DEVICES = {
    "orin-nano-8gb": Device("orin-nano-8gb", 8 * 2**30, 5_200_000_000, 865_000_000, _SUPER),
}


def find_device(name: str) -> Device:
    """The device of this name.

    Raises:
        UnknownDeviceError: none of those known.
    """
    if name not in DEVICES:
        raise UnknownDeviceError(f"--device {name}: known are {', '.join(sorted(DEVICES))}")
    return DEVICES[name]
