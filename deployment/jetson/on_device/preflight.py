"""Can this device take this bundle? L4T release, memory, disk, and the llama.cpp runtime.

Standard library only, Python 3.10. What cannot be found out is a failure, never a pass.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

try:
    from deployment.jetson.on_device.l4t import (
        RELEASE_FILE,
        L4tError,
        check_range,
        parse_release_file,
    )
except ModuleNotFoundError:  # beside this file on the device
    from l4t import (  # type: ignore[import-not-found,no-redef]
        RELEASE_FILE,
        L4tError,
        check_range,
        parse_release_file,
    )

log = logging.getLogger("preflight")
MEBIBYTE = 1 << 20
_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_ASK_VERSION = "from importlib.metadata import version; print(version('llama_cpp_python'))"


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


def check_runtime(python: str, wanted: str) -> str:
    """The interpreter has the llama-cpp-python that the golden prompts were made with."""
    command = [python, "-c", _ASK_VERSION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(f"cannot run {python}: {error}") from None
    found = done.stdout.strip()
    if done.returncode != 0 or found != wanted:
        raise PreflightError(
            f"{python} has llama-cpp-python {found or 'not at all'}; {wanted} is needed. Build it "
            'there with CMAKE_ARGS="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=87"'
        )
    return f"runtime: llama-cpp-python {found}"


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

    `hardware=False` leaves out L4T and memory; without a `target` to copy to, so is the disk.

    Raises:
        PreflightError: naming every check that failed.
    """
    size = sum(entry["size"] for entry in manifest["files"].values())
    need = manifest["models"][manifest["default"]]["memory"]["total_bytes"]
    checks = [lambda: check_runtime(python, manifest["llama_cpp_python"])]
    if target is not None:
        checks.append(lambda: check_disk(target, size + size // 10))
    if hardware:
        checks += [
            lambda: check_l4t(root, manifest["l4t"]),
            lambda: check_memory(root, need, reclaim),
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
