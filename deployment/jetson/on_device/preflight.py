"""Can this device take this bundle? L4T release, memory, disk, power mode, model server.

Standard library only, Python 3.10. What cannot be found out is a failure, never a pass; only the
power mode is merely told, since every mode works.
"""

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

try:
    from deployment.jetson.on_device.l4t import (
        RELEASE_FILE,
        Fit,
        L4tError,
        check_range,
        fits,
        parse_release_file,
        parse_version,
    )
    from deployment.jetson.on_device.runtime import (
        RuntimeMismatchError,
        built_for,
        check_llama_server,
        check_python,
    )
    from deployment.jetson.on_device.settings import SettingsError, read_settings
except ModuleNotFoundError:  # beside this file on the device
    from l4t import (  # type: ignore[import-not-found,no-redef]
        RELEASE_FILE,
        Fit,
        L4tError,
        check_range,
        fits,
        parse_release_file,
        parse_version,
    )
    from runtime import (  # type: ignore[import-not-found,no-redef]
        RuntimeMismatchError,
        built_for,
        check_llama_server,
        check_python,
    )
    from settings import SettingsError, read_settings  # type: ignore[import-not-found,no-redef]

log = logging.getLogger("preflight")
MEBIBYTE = 1 << 20
_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_MODE = re.compile(r"^NV Power Mode:\s*(\S+)\s*$", re.MULTILINE)
_SBIN = "/usr/sbin"


class PreflightError(ValueError):
    """The device cannot take the bundle; says what it lacks and what to do."""


def check_l4t(root: Path, wanted: Mapping) -> str:
    """The host's release, if the bundle was made for it.

    Raises:
        PreflightError: not a Jetson, an unknown release, or one outside the range.
    """
    try:
        host = parse_release_file((root / RELEASE_FILE).read_text(encoding="utf-8"))
        check_range(host, wanted["min"], wanted["max_major"])
    except FileNotFoundError:
        raise PreflightError(
            f"{root / RELEASE_FILE} is missing: this is not a Jetson, or not its root"
        ) from None
    except (L4tError, OSError, UnicodeDecodeError) as error:
        raise PreflightError(str(error)) from None
    return f"L4T {host}"


def available_bytes(root: Path) -> int:
    """`MemAvailable` of `/proc/meminfo` under `root`, bytes.

    Raises:
        PreflightError: it cannot be read; unified memory is never assumed to be enough.
    """
    path = root / "proc/meminfo"
    try:
        match = _AVAILABLE.search(path.read_text())
    except OSError as error:
        raise PreflightError(f"cannot read {path}: {error.strerror}") from None
    if match is None:
        raise PreflightError(f"{path} has no MemAvailable line")
    return int(match[1]) * 1024


def check_memory(root: Path, need: int, reclaim: int = 0) -> str:
    """Compare what the default model needs with what is free now.

    `reclaim` bytes are held by the release that stops before this one starts.
    """
    have = available_bytes(root) + reclaim
    if have < need:
        raise PreflightError(
            f"MemAvailable is {have // MEBIBYTE} MiB, the model needs {need // MEBIBYTE} MiB "
            "(weights + KV cache + compute + CUDA + margin); stop other programs or the desktop "
            "(systemctl isolate multi-user.target), or use a smaller quantisation"
        )
    return f"memory: {have // MEBIBYTE} MiB available, {need // MEBIBYTE} MiB needed"


def check_disk(target: Path, need: int) -> str:
    """Compare the bundle's size with the free space where it is to lie."""
    folder = target
    while not folder.exists():
        folder = folder.parent
    info = os.statvfs(folder)
    have = info.f_bavail * info.f_frsize
    if have < need:
        raise PreflightError(
            f"{folder} has {have // MEBIBYTE} MiB free, {need // MEBIBYTE} MiB are needed"
        )
    return f"disk: {have // MEBIBYTE} MiB free, {need // MEBIBYTE} MiB needed"


def check_runtime(root: Path, python: str, manifest: Mapping) -> str:
    """The model server this device runs is there, and the one the bundle was made with.

    Raises:
        PreflightError: it is not, or the device's settings cannot be read.
    """
    try:
        server = read_settings(root).llama_server
        if server is None:
            return check_python(python, manifest["llama_cpp_python"])
        return check_llama_server(server, manifest["llama_cpp_source"])
    except (RuntimeMismatchError, SettingsError) as error:
        raise PreflightError(str(error)) from None


def check_built_here(root: Path) -> str:
    """A llama-server for CUDA was built on this L4T major: drivers of another refuse it.

    Raises:
        PreflightError: another major, or a release that cannot be read.
    """
    try:
        server = read_settings(root).llama_server
        built = None if server is None else built_for(server)
        if built is None:
            return "build: nothing here depends on the L4T release it was built on"
        host = parse_release_file((root / RELEASE_FILE).read_text(encoding="utf-8"))
        fit = fits(host, parse_version(built))
    except (RuntimeMismatchError, SettingsError, L4tError, OSError, UnicodeDecodeError) as error:
        raise PreflightError(str(error)) from None
    if fit is Fit.NO:
        raise PreflightError(
            f"{server} was built on L4T {built} and this device runs {host}: the major must be the "
            "same. Build it again here with the bundle's build_llama_server.sh"
        )
    return f"build: on L4T {built} for {host}, {fit.value}"


def power_mode(manifest: Mapping) -> str:
    """The power mode `nvpmodel -q` tells, and the speed planned for it; unknown is said."""
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), _SBIN])
    program = shutil.which("nvpmodel", path=search)
    if program is None:
        return "power mode: unknown, there is no nvpmodel"
    command = [program, "-q"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"power mode: unknown, {program} failed: {error}"
    match = _MODE.search(done.stdout)
    if match is None:
        return f"power mode: unknown, {program} -q names none (status {done.returncode})"
    planned = manifest["models"][manifest["default"]].get("predicted", {}).get("tokens_per_s", {})
    if match[1] not in planned:
        return f"power mode: {match[1]}, no speed was planned for it"
    low, high = planned[match[1]]["expected"]
    return f"power mode: {match[1]}, {low:.0f} to {high:.0f} tokens/s expected"


def preflight(
    manifest: Mapping,
    root: Path,
    target: "Path | None",
    python: str,
    *,
    hardware: bool,
    reclaim: int = 0,
) -> "list[str]":
    """What was found, one line a check.

    `hardware=False` leaves out L4T, memory and power; without a `target` to copy to, so is the
    disk.

    Raises:
        PreflightError: naming every check that failed.
    """
    size = sum(entry["size"] for entry in manifest["files"].values())
    need = manifest["models"][manifest["default"]]["memory"]["total_bytes"]
    checks = [lambda: check_runtime(root, python, manifest)]
    if target is not None:
        checks.append(lambda: check_disk(target, size + size // 10))
    if hardware:
        checks += [
            lambda: check_l4t(root, manifest["l4t"]),
            lambda: check_memory(root, need, reclaim),
            lambda: check_built_here(root),
            lambda: power_mode(manifest),
        ]
    found, failed = [], []
    for check in checks:
        try:
            found.append(check())
        except PreflightError as error:
            failed.append(str(error))
    if failed:
        raise PreflightError("; ".join(failed))
    return found


def main(argv: "list[str] | None" = None) -> int:
    """Command line; 0 when the device can take the bundle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--bundle", type=Path, default=here)
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--target", type=Path, help="folder a copy is to be made in")
    parser.add_argument("--python", default="python3")
    parser.add_argument("--skip-hardware", action="store_true", help="leave out L4T and memory")
    parser.add_argument(
        "--reclaim", type=int, default=0, help="bytes the running release gives back when it stops"
    )
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="preflight: %(message)s", stream=sys.stderr)
    manifest = json.loads((options.bundle / "manifest.json").read_bytes())
    hardware = not options.skip_hardware
    try:
        lines = preflight(
            manifest,
            options.root,
            options.target,
            options.python,
            hardware=hardware,
            reclaim=options.reclaim,
        )
    except PreflightError as error:
        log.error("FAILED: %s", error)
        return 1
    for line in lines:
        log.info("%s", line)
    if not hardware:
        log.warning("L4T and memory were NOT checked (--skip-hardware)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
