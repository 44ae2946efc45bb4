import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deployment.jetson.on_device.verify import BundleError, read_manifest, safe_relative
from deployment.jetson.serve import verified
from deployment.jetson.signing import sign, signing_key
from deployment.jetson.signing import verify as python_verify
from deployment.jetson.stage import FROM_TRAINING, ON_DEVICE


@pytest.fixture
def bundle(package, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(package.bundle, tmp_path / "bundle"))


def _refused(bundle, package, match):
    with pytest.raises(BundleError, match=match), verified(bundle, package.pin):
        pass


def _resign(bundle, change, key):
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    change(manifest)
    raw = json.dumps(manifest).encode()
    (bundle / "manifest.json").write_bytes(raw)
    (bundle / "manifest.json.sig").write_text(sign(raw, key))


def test_good_bundle_and_its_archive(package):
    for place in (package.bundle, package.archive):
        with verified(place, package.pin) as (folder, manifest):
            assert manifest["name"] == "agent"
            assert (folder / "agent.py").is_file()


def test_good_bundle_without_ssh_keygen(package, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with verified(package.bundle, package.pin) as (_, manifest):
        assert manifest["default"] == "Q8_0"


def test_every_file_is_covered(bundle, package):
    """One flipped bit anywhere, in any file, at the start, middle or end, is refused."""
    for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
        good = path.read_bytes()
        for place in {0, len(good) // 2, len(good) - 1}:
            bad = bytearray(good)
            bad[place] ^= 1
            path.write_bytes(bad)
            if path.name == "manifest.json.sig":
                _refused(bundle, package, "signature")  # its last newline included
            else:
                _refused(bundle, package, rf"{path.name} was changed|not a good signature")
        path.write_bytes(good)
    with verified(bundle, package.pin):
        pass


def test_resigned_by_another_key_is_refused(bundle, package):
    _resign(bundle, lambda m: None, Ed25519PrivateKey.generate())
    _refused(bundle, package, "signed by another key")


def test_resigned_by_another_key_is_refused_without_ssh_keygen(bundle, package, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    _resign(bundle, lambda m: None, Ed25519PrivateKey.generate())
    _refused(bundle, package, "a key that is not in")


def test_a_bundle_never_brings_its_own_trust(bundle, package):
    shutil.copy(package.pin, bundle / "allowed_signers")
    with (
        pytest.raises(BundleError, match="never brings its own trust"),
        verified(bundle, bundle / "allowed_signers"),
    ):
        pass


def test_no_pin_is_refused(bundle, tmp_path):
    with pytest.raises(BundleError, match="enrolment"), verified(bundle, tmp_path / "none"):
        pass


@pytest.mark.parametrize("name", ["extra.txt", "models/extra.gguf", "__pycache__/agent.pyc", ".x"])
def test_added_file_is_refused(bundle, package, name):
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("x")
    _refused(bundle, package, "not in the signed manifest")


def test_added_empty_folder_is_refused(bundle, package):
    (bundle / "new").mkdir()
    _refused(bundle, package, "empty folder")


@pytest.mark.parametrize("name", ["agent.py", "LICENSE", "models/Q8_0.gguf"])
def test_missing_file_is_refused(bundle, package, name):
    (bundle / name).unlink()
    _refused(bundle, package, "missing from the bundle|empty folder")


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.sig"])
def test_missing_manifest_or_signature_is_refused(bundle, package, name):
    (bundle / name).unlink()
    _refused(bundle, package, "missing")


def test_links_are_refused(bundle, package, tmp_path):
    (tmp_path / "agent.py").write_bytes((bundle / "agent.py").read_bytes())
    (bundle / "agent.py").unlink()
    (bundle / "agent.py").symlink_to(tmp_path / "agent.py")
    _refused(bundle, package, "link or a special file")


def test_linked_folder_is_refused(bundle, package, tmp_path):
    shutil.move(bundle / "models", tmp_path / "models")
    (bundle / "models").symlink_to(tmp_path / "models")
    _refused(bundle, package, "link or a special file")


def test_fifo_is_refused(bundle, package):
    os.mkfifo(bundle / "pipe")
    _refused(bundle, package, "special file")


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../b", "", ".", "./a", "a//b", "a\\b", "a\nb", "a/", 3, None],
)
def test_unsafe_paths(name):
    with pytest.raises(BundleError, match="unsafe path"):
        safe_relative(name)


def test_path_traversal_in_a_well_signed_manifest_is_refused(bundle, package, facts):
    key = signing_key(facts.key_dir, {}).private

    def change(manifest):
        manifest["files"]["../pin"] = {"sha256": "0" * 64, "size": 0}

    _resign(bundle, change, key)
    _refused(bundle, package, "unsafe path")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"format": 1}',
        b'{"format": 2, "files": {"a": {"sha256": "' + b"0" * 64 + b'", "size": 1}}}',
        b'{"format": 1, "files": {}}',
        b'{"format": 1, "format": 1, "files": {}}',
        b'{"format": 1, "files": {"a": 1}}',
        b'{"format": 1, "files": {"a": {"sha256": "0", "size": 1}}}',
        b'{"format": 1, "files": {"a": {"sha256": "' + b"0" * 64 + b'", "size": true}}}',
    ],
)
def test_malformed_manifests(raw):
    with pytest.raises(BundleError):
        read_manifest(raw)


def test_command_line_on_the_device(package, bundle):
    """The bundle's own verifier, with nothing but the standard library."""
    command = [sys.executable, "-S", "-E", "-B", str(bundle / "verify.py"), str(bundle)]
    command += ["--allowed-signers", str(package.pin)]
    good = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert (good.returncode, good.stderr.startswith("good: agent")) == (0, True)
    (bundle / "NOTICE").write_text("changed")
    bad = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert bad.returncode == 1
    assert bad.stderr.startswith("REFUSED: NOTICE has 7 bytes")


def test_python_and_ssh_keygen_agree_on_the_bundle(package):
    raw = (package.bundle / "manifest.json").read_bytes()
    python_verify(raw, package.bundle / "manifest.json.sig", package.pin)


@pytest.mark.parametrize("name", [n for n in (*ON_DEVICE, *FROM_TRAINING) if n.endswith(".py")])
def test_on_device_code_is_standard_library_in_python_3_10(package, name):
    tree = ast.parse((package.bundle / name).read_text(), feature_version=(3, 10))
    siblings = {p.stem for p in package.bundle.glob("*.py")}
    guarded = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.Try)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        else:
            continue
        for module in names:
            top = module.partition(".")[0]
            ours = top in ("tasks", "deployment") and node in guarded
            assert ours or top in siblings or top in sys.stdlib_module_names, (name, module)
