"""The build script on sources built in a second, and on Jetsons of every kind."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployment.jetson.errors import MissingInputError
from deployment.jetson.runtime_source import SOURCES, source_of
from deployment.jetson.stage import ON_DEVICE

SCRIPTS = Path("deployment/jetson/on_device")
FILE = "llama_cpp_python-9.tar.gz"
PROJECT = """
cmake_minimum_required(VERSION 3.14)
project(tiny C)
add_executable(llama-server main.c)
set_target_properties(llama-server PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
"""
GOOD = '#include <stdio.h>\nint main(void) { puts("version: 9"); return 0; }\n'
pytestmark = pytest.mark.needs("cmake", "cc")


def _source(path, cmake=PROJECT, main=GOOD, top="llama_cpp_python-9/vendor/llama.cpp"):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (("CMakeLists.txt", cmake), ("main.c", main)):
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def device(tmp_path):
    """A folder with the script as a bundle has it, a source, and a root of its own."""
    bundle, prefix, root = (tmp_path / name for name in ("bundle", "runtime", "root"))
    (root / "etc").mkdir(parents=True)
    bundle.mkdir()
    for name in ("build_llama_server.sh", "l4t.py"):
        shutil.copy(SCRIPTS / name, bundle)
    return SimpleNamespace(bundle=bundle, prefix=prefix, root=root, source=tmp_path / FILE)


def _name_source(device, **changes):
    sha256 = hashlib.sha256(device.source.read_bytes()).hexdigest()
    source = {"file": FILE, "sha256": sha256, **changes}
    (device.bundle / "manifest.json").write_text(json.dumps({"llama_cpp_source": source}))


def _build(device, *options, named=True, path=None):
    command = [device.bundle / "build_llama_server.sh", "--prefix", device.prefix, "--jobs", "1"]
    command += ["--root", device.root, *(["--source", device.source] if named else []), *options]
    environment = {k: v for k, v in os.environ.items() if k != "CUDACXX"}
    environment["PATH"] = os.pathsep.join([str(path)] * (path is not None) + [os.environ["PATH"]])
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment
    )


def _left(device):
    if not device.prefix.exists():
        return []
    return sorted(str(p.relative_to(device.prefix)) for p in device.prefix.rglob("*.*"))


def test_server_is_built_checked_and_says_from_what(device):
    _source(device.source)
    _name_source(device)
    done = _build(device, "--cpu")
    assert done.returncode == 0, done.stderr
    assert "expect a fraction of the speed" in done.stderr
    server = device.prefix / "bin/llama-server"
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == "version: 9\n"
    note = json.loads((device.prefix / "bin/llama-server.json").read_bytes())
    sha256 = hashlib.sha256(device.source.read_bytes()).hexdigest()
    assert note == {"source_sha256": sha256, "backend": "cpu", "l4t": None}
    assert _left(device) == ["bin/llama-server.json"]  # no build folder


def test_source_is_looked_for_where_the_manifest_says(device):
    _source(device.source)
    _name_source(device)
    done = _build(device, "--cpu", "--configure-only", named=False)
    assert (done.returncode, f"copy {FILE} (sha256 " in done.stderr) == (1, True)
    (device.prefix / "src").mkdir(parents=True)
    shutil.copy(device.source, device.prefix / "src" / FILE)
    done = _build(device, "--cpu", "--configure-only", named=False)
    assert done.returncode == 0, done.stderr


def test_another_source_is_not_built(device):
    _source(device.source)
    _name_source(device)
    with device.source.open("r+b") as file:
        file.write(b"\x00")
    done = _build(device, "--cpu")
    assert (done.returncode, "the signed manifest names" in done.stderr) == (1, True)
    assert _left(device) == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"file": "../x"}, "bad source"), ({"sha256": "short"}, "bad source")],
)
def test_manifest_that_names_no_good_source(device, changes, match):
    _source(device.source)
    _name_source(device, **changes)
    done = _build(device, "--cpu")
    assert (done.returncode, match in done.stderr) == (1, True)


def test_manifest_of_an_older_bundle(device):
    _source(device.source)
    (device.bundle / "manifest.json").write_text("{}")
    done = _build(device, "--cpu")
    assert (done.returncode, "names no source of llama.cpp" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("project", "match"),
    [
        ({"cmake": "message(FATAL_ERROR no)"}, "cmake did not configure"),
        ({"main": "int main(void) { return x; }"}, "llama-server did not build"),
        ({"main": "int main(void) { return 3; }"}, "the new llama-server does not start"),
        ({"top": "other"}, "tar: "),
    ],
)
def test_server_that_runs_now_is_kept_when_a_build_fails(device, project, match):
    (device.prefix / "bin").mkdir(parents=True)
    (device.prefix / "bin/llama-server").write_text("the one before")
    _source(device.source, **project)
    _name_source(device)
    done = _build(device, "--cpu")
    assert (done.returncode != 0, match in done.stderr) == (True, True), done.stderr
    assert (device.prefix / "bin/llama-server").read_text() == "the one before"
    assert [p.name for p in device.prefix.iterdir()] == ["bin"]


def _jetson(device, release):
    if release is not None:
        text = f"# R{release[0]} (release), REVISION: {release[1]}, GCID: 1\n"
        (device.root / "etc/nv_tegra_release").write_text(text)


def _tools(device, cuda):
    """An nvcc that says its version, and a cmake that only writes down how it was called."""
    folder = device.bundle / "tools"
    folder.mkdir()
    scripts = {"cmake": f'printf "%s\\n" "$@" >{device.bundle}/called'}
    if cuda is not None:
        scripts["nvcc"] = f'echo "Cuda compilation tools, release {cuda}, V{cuda}.1"'
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("release", "cuda", "note"),
    [
        (("36", "4.3"), "12.6", "CUDA 12, architecture 87 (JetPack 6)"),
        (("38", "2.0"), "13.0", "CUDA 13, architecture 87 (JetPack 7)"),
        (("39", "2.0"), "13.2", "CUDA 13, architecture 87 (JetPack 7)"),
    ],
)
def test_a20_jetpack_6_and_7_get_cuda_for_orin(device, release, cuda, note):
    _source(device.source)
    _name_source(device)
    _jetson(device, release)
    done = _build(device, "--configure-only", path=_tools(device, cuda))
    assert done.returncode == 0, done.stderr
    assert note in done.stderr
    called = (device.bundle / "called").read_text().splitlines()
    assert {
        "-DGGML_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=87",
        "-DGGML_CUDA_NO_VMM=ON",
        "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        f"-DCMAKE_CUDA_COMPILER={device.bundle}/tools/nvcc",
    } <= set(called)


@pytest.mark.parametrize(
    ("release", "cuda", "match"),
    [
        (None, "12.6", "--cpu builds a server for the CPU"),
        (("35", "4.1"), "11.4", "L4T 35.4.1: only JetPack 6"),
        (("32", "7.6"), "10.2", "L4T 32.7.6: only JetPack 6"),
        (("40", "1.0"), "14.0", "L4T 40.1.0: only JetPack 6"),
        (("xx", "1.0"), "12.6", "nothing is guessed"),
        (("36", "4.3"), "13.0", "is CUDA 13; JetPack 6 has CUDA 12"),
        (("39", "2.0"), "12.6", "is CUDA 12; JetPack 7 has CUDA 13"),
        (("36", "4.3"), "none", "is CUDA unknown"),
    ],
)
def test_a20_what_is_not_known_is_not_guessed(device, release, cuda, match):
    """And never built for the CPU in silence."""
    _source(device.source)
    _name_source(device)
    _jetson(device, release)
    done = _build(device, path=_tools(device, cuda))
    assert (done.returncode, match in done.stderr) == (1, True), done.stderr
    assert not (device.bundle / "called").exists()
    assert _left(device) == []


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--nonsense"], ["--source"]])
def test_bad_options(device, options):
    _source(device.source)
    _name_source(device)
    done = _build(device, "--cpu", *options)
    assert done.returncode == 1
    assert _left(device) == []


def test_script_is_in_every_bundle_and_names_the_installed_version(package):
    from importlib.metadata import version

    assert "build_llama_server.sh" in ON_DEVICE
    named = package.manifest["llama_cpp_source"]
    assert named == source_of(version("llama_cpp_python"))
    assert named["place"] == f"/opt/rl-pipeline-runtime/src/{named['file']}"
    assert all(len(sha256) == 64 for sha256, _ in SOURCES.values())


def test_version_whose_source_nobody_hashed():
    with pytest.raises(MissingInputError, match=r"0\.0\.1 is installed"):
        source_of("0.0.1")
