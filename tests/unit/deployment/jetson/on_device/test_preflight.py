import subprocess
import sys
from importlib.metadata import version

import pytest

from deployment.jetson.on_device.preflight import (
    MEBIBYTE,
    PreflightError,
    available_bytes,
    check_disk,
    check_l4t,
    check_memory,
    check_runtime,
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
    assert sorted(line.split()[0] for line in found) == ["L4T", "disk:", "memory:", "runtime:"]


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


def test_runtime_must_be_the_recorded_one():
    have = version("llama_cpp_python")
    assert check_runtime(sys.executable, have) == f"runtime: llama-cpp-python {have}"
    with pytest.raises(PreflightError, match=r"0\.0\.1 is needed"):
        check_runtime(sys.executable, "0.0.1")


def test_runtime_without_llama_cpp_or_interpreter():
    with pytest.raises(PreflightError, match="cannot run"):
        check_runtime("/nonexistent/python", "1")
    with pytest.raises(PreflightError, match="not at all"):
        check_runtime("/bin/false", "1")


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
