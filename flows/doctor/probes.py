"""Single looks at a machine: GPUs, installed packages, ports, locks, the MLflow store.

Each only looks: nothing is installed, started or changed, and no heavy library is imported.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flows.doctor.findings import Finding
from tasks.tracking.reachable import why_unreachable
from tasks.tracking.tracker import default_uri

GIB = 1 << 30
_PID = re.compile(r'(?:^|"pid":\s*)(\d{1,7})\b')
COMMAND_TIMEOUT_S = 10.0
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;#]+)")


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    name: str
    memory_gib: float


@dataclass(frozen=True)
class MachineFacts:
    """What profiles are compared with; None where it could not be told."""

    cores: int
    memory_gib: float
    disk_gib: float
    gpus: tuple[Gpu, ...]


def cgroup_memory_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """The container's memory limit, bytes; None where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def find_gpus() -> tuple[Gpu, ...]:
    """GPUs that nvidia-smi lists; none where there is no such command."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's `name, MiB` lines; a line it does not fill in is left out."""
    found = []
    for line in listing.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name and mebibytes.strip().isdigit():
            found.append(Gpu(name.strip(), int(mebibytes) / 1024))
    return tuple(found)


def machine_facts(folder: Path) -> MachineFacts:
    """Cores, memory, disk under `folder`, GPUs."""
    import psutil

    memory = psutil.virtual_memory().total
    limit = cgroup_memory_limit()
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_gib=min(memory, limit or memory) / GIB,
        disk_gib=shutil.disk_usage(existing).free / GIB,
        gpus=find_gpus(),
    )


def read_lock(path: Path) -> dict[str, str]:
    """Pinned versions by name."""
    pins = (_PIN.match(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {pin[1]: pin[2] for pin in pins if pin}


def compare_with_lock(pins: Mapping[str, str], installed: Mapping[str, str | None]) -> list[str]:
    """One line for each pin that is not installed as pinned; a build tag is no difference."""
    wrong = []
    for name, version in pins.items():
        found = installed.get(name)
        if found is None:
            wrong.append(f"{name} missing")
        elif found.split("+")[0] != version.split("+")[0]:
            wrong.append(f"{name} {found} instead of {version}")
    return wrong


def locked_packages(lock: Path) -> Finding:
    """Installed packages against the lock."""
    try:
        pins = read_lock(lock)
    except OSError:
        return Finding(
            "packages",
            "warn",
            f"{lock.name} is not beside the code",
            "clone the whole project; the lock is part of it",
        )
    wrong = compare_with_lock(pins, {name: _version(name) for name in pins})
    if not wrong:
        return Finding("packages", "pass", f"all {len(pins)} as locked")
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    missing = any(line.endswith("missing") for line in wrong)
    return Finding(
        "packages",
        "fail" if missing else "warn",
        ", ".join(wrong[:4]) + more,
        "rm -f .venv/.installed && make install",
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def port_free(port: int, host: str = "127.0.0.1") -> Finding:
    """Whether `serve` can listen on its default port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding(
                "port for serving",
                "warn",
                f"{host}:{port}: {error.strerror}",
                "give `rl-pipeline serve` another one: --port 8090",
            )
    return Finding("port for serving", "pass", f"{host}:{port} is free")


def stale_locks(runs: Path) -> Finding:
    """Lock and pid files whose process is gone: a run was killed there."""
    found = [path for path in _lock_files(runs) if _owner_is_gone(path)]
    if not found:
        return Finding("stale locks", "pass", f"none under {runs}")
    names = ", ".join(str(path) for path in found[:3])
    return Finding(
        "stale locks",
        "warn",
        f"{names}: its process is gone",
        "start the run again: it ends what is left and goes on from its checkpoint",
    )


def _lock_files(runs: Path) -> list[Path]:
    """Locks in the run folder itself; the store below it holds artefacts only."""
    if not runs.is_dir():
        return []
    return sorted(p for p in runs.iterdir() if p.suffix in (".lock", ".pid") and p.is_file())


def _owner_is_gone(path: Path) -> bool:
    """Whether the file names a process that no longer runs; a file with no pid cannot tell."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return False
    number = _PID.search(text)
    return number is not None and not Path(f"/proc/{number[1]}").exists()


def tracking_store(uri: str | None, runs: Path) -> Finding:
    """Whether MLflow's store answers; a run goes on without it and uploads later."""
    store = uri or default_uri(runs)
    problem = why_unreachable(store)
    if problem is None:
        return Finding("MLflow store", "pass", f"{store} can be written")
    return Finding(
        "MLflow store",
        "warn",
        problem,
        "make it answer; else the run goes on, and `rl-pipeline upload` logs it later",
    )
