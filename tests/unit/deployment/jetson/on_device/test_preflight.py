import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from deployment.jetson.on_device.preflight import (
    MEBIBYTE,
    PreflightError,
    available_bytes,
    check_built_here,
    check_disk,
    check_l4t,
    check_memory,
    check_runtime,
    power_mode,
    preflight,
)

WANTED = {"min": "36.0", "max_major": 36}


@pytest.fixture
def root(tmp_path):
    """The root of a device: L4T 36.4.3, 4 GiB available."""
    return make_root(tmp_path)


def make_root(folder, release="36 (release), REVISION: 4.3", available_kb=4 << 20):
    (folder / "etc").mkdir()
    (folder / "proc").mkdir()
    (folder / "etc" / "nv_tegra_release").write_text(f"# R{release}, GCID: 1, BOARD: generic\n")
    meminfo = f"MemTotal:  8000000 kB\nMemAvailable:   {available_kb} kB\n"
    (folder / "proc" / "meminfo").write_text(meminfo)
    return folder


def test_good_device(root, package):
    found = preflight(package.manifest, root, root, sys.executable, hardware=True)
    kinds = sorted(line.split()[0] for line in found)
    assert kinds == ["L4T", "build:", "disk:", "memory:", "power", "runtime:"]


def test_l4t_of_another_major(tmp_path):
    root = make_root(tmp_path, release="35 (release), REVISION: 4.1")
    with pytest.raises(PreflightError, match=r"host runs L4T 35\.4\.1"):
        check_l4t(root, WANTED)


def test_unknown_l4t_is_a_failure(tmp_path):
    root = make_root(tmp_path, release="??")
    with pytest.raises(PreflightError, match="nothing is guessed"):
        check_l4t(root, WANTED)


def test_no_jetson(tmp_path):
    with pytest.raises(PreflightError, match="not a Jetson"):
        check_l4t(tmp_path, WANTED)


def test_memory_is_compared_to_the_byte(tmp_path):
    root = make_root(tmp_path, available_kb=1024)
    assert available_bytes(root) == MEBIBYTE
    assert check_memory(root, MEBIBYTE) == "memory: 1 MiB available, 1 MiB needed"
    with pytest.raises(PreflightError, match="MemAvailable is 1 MiB"):
        check_memory(root, MEBIBYTE + 1)


@pytest.mark.parametrize("text", ["", "MemFree: 1 kB\n", "MemAvailable: lots kB\n"])
def test_unknown_memory_is_a_failure(tmp_path, text):
    root = make_root(tmp_path)
    (root / "proc" / "meminfo").write_text(text)
    with pytest.raises(PreflightError, match="no MemAvailable"):
        check_memory(root, 1)


def test_unreadable_memory_is_a_failure(tmp_path):
    with pytest.raises(PreflightError, match="cannot read"):
        available_bytes(tmp_path)


def test_disk_of_a_folder_still_to_be_made(tmp_path):
    assert check_disk(tmp_path / "a" / "b", 1).startswith("disk: ")
    with pytest.raises(PreflightError, match="MiB free"):
        check_disk(tmp_path / "a" / "b", 1 << 60)


def test_runtime_must_be_the_recorded_one(root):
    have = version("llama_cpp_python")
    good = {"llama_cpp_python": have}
    assert check_runtime(root, sys.executable, good) == f"runtime: llama-cpp-python {have}"
    with pytest.raises(PreflightError, match=r"0\.0\.1 is needed"):
        check_runtime(root, sys.executable, {"llama_cpp_python": "0.0.1"})


def test_runtime_without_llama_cpp_or_interpreter(root):
    with pytest.raises(PreflightError, match="cannot run"):
        check_runtime(root, "/nonexistent/python", {"llama_cpp_python": "1"})
    with pytest.raises(PreflightError, match="not at all"):
        check_runtime(root, "/bin/false", {"llama_cpp_python": "1"})


SOURCE = {"file": "llama.tar.gz", "sha256": "a" * 64}


def _with_llama_server(root, note, program="exit 0"):
    """A device whose settings name a llama-server, and what its build script wrote beside it."""
    server = root / "llama-server"
    server.write_text(f"#!/bin/sh\n{program}\n")
    server.chmod(0o755)
    if note is not None:
        (root / "llama-server.json").write_text(note)
    (root / "etc/rl-pipeline").mkdir(parents=True, exist_ok=True)
    settings = root / "etc/rl-pipeline/agent.json"
    settings.write_text(json.dumps({"llama_server": str(server)}))
    settings.chmod(0o644)


def _note(sha256="a" * 64, l4t="36.4.0"):
    return json.dumps({"source_sha256": sha256, "backend": "CUDA 12", "l4t": l4t})


def test_llama_server_of_the_named_source(root):
    _with_llama_server(root, _note())
    said = check_runtime(root, "/nonexistent/python", {"llama_cpp_source": SOURCE})
    assert said == "runtime: llama-server for CUDA 12, from llama.tar.gz"


@pytest.mark.parametrize(
    ("note", "program", "match"),
    [
        (None, "exit 0", "does not say what"),
        ("{", "exit 0", "does not say what"),
        ("[]", "exit 0", "does not say what"),
        (_note(sha256="b" * 64), "exit 0", "from another source"),
        (_note(), "exit 3", r"--version failed \(status 3\)"),
    ],
)
def test_llama_server_that_is_another(root, note, program, match):
    _with_llama_server(root, note, program)
    with pytest.raises(PreflightError, match=match):
        check_runtime(root, sys.executable, {"llama_cpp_source": SOURCE})


def test_settings_that_cannot_be_read_fail_the_check(root):
    _with_llama_server(root, _note())
    (root / "etc/rl-pipeline/agent.json").chmod(0o666)
    with pytest.raises(PreflightError, match="can be changed by others"):
        check_runtime(root, sys.executable, {"llama_cpp_source": SOURCE})


@pytest.mark.parametrize(
    ("host", "built", "right"),
    [
        ("35 (release), REVISION: 4.1", "36.2.0", False),
        ("36 (release), REVISION: 3.0", "36.2.0", True),
        ("35 (release), REVISION: 4.1", "35.3.1", True),
        ("32 (release), REVISION: 7.4", "32.7.1", True),
        ("32 (release), REVISION: 7.6", "36.4.0", False),
        ("39 (release), REVISION: 2.0", "36.4.3", False),
    ],
)
def test_a20_a_server_built_on_another_major_is_refused(tmp_path, host, built, right):
    """A device flashed anew keeps /opt: its old llama-server would not find its libraries."""
    root = make_root(tmp_path, release=host)
    _with_llama_server(root, _note(l4t=built))
    if right:
        assert check_built_here(root).startswith(f"build: on L4T {built} for ")
    else:
        with pytest.raises(PreflightError, match="the major must be the same"):
            check_built_here(root)


def test_a20_a_server_for_the_cpu_or_none_depends_on_no_release(tmp_path):
    root = make_root(tmp_path, release="99 (release), REVISION: 9.9")
    assert "nothing here depends" in check_built_here(root)
    _with_llama_server(root, _note(l4t=None))
    assert "nothing here depends" in check_built_here(root)


def test_a20_a_server_built_on_an_unknown_release_is_refused(root):
    _with_llama_server(root, _note(l4t="latest"))
    with pytest.raises(PreflightError, match="'latest' is not an L4T release"):
        check_built_here(root)


def _nvpmodel(folder, monkeypatch, script):
    program = folder / "nvpmodel"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


PLANNED = {
    "default": "Q8_0",
    "models": {"Q8_0": {"predicted": {"tokens_per_s": {"15W": {"expected": [10.4, 11.6]}}}}},
}


@pytest.mark.parametrize(
    ("script", "right"),
    [
        ("printf 'NV Power Mode: 15W\\n0\\n'", "power mode: 15W, 10 to 12 tokens/s expected"),
        ("printf 'NV Power Mode: 40W\\n4\\n'", "power mode: 40W, no speed was planned for it"),
        ("echo nonsense; exit 2", "names none (status 2)"),
        ("echo", "names none (status 0)"),
    ],
)
def test_power_mode_is_told_with_the_speed_planned_for_it(tmp_path, monkeypatch, script, right):
    _nvpmodel(tmp_path, monkeypatch, script)
    assert right in power_mode(PLANNED)


def test_power_mode_without_nvpmodel_or_without_a_plan(tmp_path, monkeypatch):
    _nvpmodel(tmp_path, monkeypatch, "printf 'NV Power Mode: 15W\\n'")
    old = {"default": "Q8_0", "models": {"Q8_0": {}}}  # a bundle from before speeds were planned
    assert "no speed was planned" in power_mode(old)
    (tmp_path / "nvpmodel").unlink()
    assert power_mode(PLANNED) == "power mode: unknown, there is no nvpmodel"


def test_every_failure_is_named_at_once(tmp_path, package):
    root = make_root(tmp_path, release="35 (release), REVISION: 4.1", available_kb=1)
    with pytest.raises(PreflightError) as caught:
        preflight(package.manifest, root, None, "/nonexistent/python", hardware=True)
    for word in ("cannot run", "35.4.1", "MemAvailable is 0 MiB"):
        assert word in str(caught.value)


def test_skipping_hardware_leaves_the_rest(tmp_path, package):
    found = preflight(package.manifest, tmp_path, tmp_path, sys.executable, hardware=False)
    assert sorted(line.split()[0] for line in found) == ["disk:", "runtime:"]


def test_script(root, package):
    command = [package.bundle / "preflight.sh", "--root", root, "--python", sys.executable]
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (good.returncode, "L4T 36.4.3" in good.stderr) == (0, True)
    (root / "etc" / "nv_tegra_release").write_text("# R32 (release), REVISION: 7.6, GCID: 1\n")
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "FAILED: host runs L4T 32.7.6" in bad.stderr
    skipped = subprocess.run(
        [*command, "--skip-hardware"], capture_output=True, text=True, check=False
    )
    assert skipped.returncode == 0
    assert "were NOT checked" in skipped.stderr


def test_memory_the_running_release_gives_back_counts(tmp_path):
    root = make_root(tmp_path, available_kb=1024)
    assert check_memory(root, 3 * MEBIBYTE, 2 * MEBIBYTE).startswith("memory: 3 MiB available")
    with pytest.raises(PreflightError, match="MemAvailable is 2 MiB"):
        check_memory(root, 3 * MEBIBYTE, MEBIBYTE)
