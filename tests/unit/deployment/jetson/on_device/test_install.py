"""install.sh and uninstall.sh on a staged root; the shell scripts' own hygiene."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployment.jetson.signing import sign, signing_key
from tasks.artifacts import hash_file

RELEASE = "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n"


@pytest.fixture
def root(tmp_path, package):
    """The root of an enrolled device."""
    root = tmp_path / "root"
    for folder in ("etc/rl-pipeline", "proc"):
        (root / folder).mkdir(parents=True)
    (root / "etc/nv_tegra_release").write_text(RELEASE)
    (root / "proc/meminfo").write_text("MemAvailable: 6000000 kB\n")
    shutil.copy(package.pin, root / "etc/rl-pipeline/allowed_signers")
    return root


def _install(bundle, root, *options):
    command = [bundle / "install.sh", "--root", root, "--python", sys.executable, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def _variant(package, facts, folder, change):
    """Another bundle signed by the pinned key: `change(folder)` edits files before signing."""
    shutil.copytree(package.bundle, folder)
    change(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"sha256": hash_file(path), "size": path.stat().st_size}
    raw = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(raw)
    key = signing_key(facts.key_dir, {})
    (folder / "manifest.json.sig").write_text(sign(raw, key.private))
    return folder


def _note(text):
    return lambda folder: (folder / "NOTICE").write_text(text)


def _spoil_golden(folder):
    golden = json.loads((folder / "golden_prompts.json").read_bytes())
    golden["prompts"][0]["turns"][0]["prompt_ids"][0] += 1
    (folder / "golden_prompts.json").write_text(json.dumps(golden))


def _sha(bundle):
    return hash_file(bundle / "manifest.json")[:12]


def _app(root):
    return root / "opt/rl-pipeline/agent"


def test_install_places_release_link_and_unit(package, root):
    done = _install(package.bundle, root)
    assert done.returncode == 0, done.stderr
    sha = _sha(package.bundle)
    assert os.readlink(_app(root) / "current") == f"releases/{sha}"
    assert not (_app(root) / "previous").exists()
    unit = (root / "etc/systemd/system/rl-pipeline-agent.service").read_text()
    assert "@" not in unit.replace("SystemCallFilter=@system-service", "").partition("[Unit]")[2]
    assert f"--python {sys.executable}" in unit
    assert "/opt/rl-pipeline/agent/current/agent.py" in unit
    assert str(root) not in unit
    assert [p.name for p in (_app(root) / "releases").iterdir()] == [sha]


def test_installing_twice_changes_nothing(package, root):
    assert _install(package.bundle, root).returncode == 0
    before = (_app(root) / "current/manifest.json").stat().st_ino
    assert _install(package.bundle, root).returncode == 0
    assert (_app(root) / "current/manifest.json").stat().st_ino == before
    assert not (_app(root) / "previous").exists()


def test_two_releases_are_kept_and_older_ones_go(package, facts, root, tmp_path):
    bundles = [
        package.bundle,
        _variant(package, facts, tmp_path / "b", _note("second")),
        _variant(package, facts, tmp_path / "c", _note("third")),
    ]
    for bundle in bundles:
        done = _install(bundle, root)
        assert done.returncode == 0, done.stderr
    assert os.readlink(_app(root) / "current") == f"releases/{_sha(bundles[2])}"
    assert os.readlink(_app(root) / "previous") == f"releases/{_sha(bundles[1])}"
    kept = sorted(p.name for p in (_app(root) / "releases").iterdir())
    assert kept == sorted(_sha(b) for b in bundles[1:])


def test_release_that_fails_its_smoke_test_is_taken_back(package, facts, root, tmp_path):
    assert _install(package.bundle, root, "--smoke").returncode == 0
    bad = _variant(package, facts, tmp_path / "bad", _spoil_golden)
    done = _install(bad, root, "--smoke")
    assert done.returncode == 1
    assert "prompt ids: token 0" in done.stderr
    assert f"{_sha(package.bundle)} is current again" in done.stderr
    assert os.readlink(_app(root) / "current") == f"releases/{_sha(package.bundle)}"
    assert [p.name for p in (_app(root) / "releases").iterdir()] == [_sha(package.bundle)]


def test_damaged_copy_on_the_device_is_replaced(package, root):
    assert _install(package.bundle, root).returncode == 0
    (_app(root) / "current/NOTICE").write_text("damaged")
    done = _install(package.bundle, root)
    assert done.returncode == 0, done.stderr
    assert "was damaged; it is replaced" in done.stderr
    assert (_app(root) / "current/NOTICE").read_bytes() == (package.bundle / "NOTICE").read_bytes()


def _assert_untouched(root, done, match):
    assert done.returncode == 1
    assert match in done.stderr
    assert "nothing was changed" in done.stderr
    assert not (root / "opt").exists()


def test_changed_bundle_is_refused(package, root, tmp_path):
    bundle = Path(shutil.copytree(package.bundle, tmp_path / "bundle"))
    with (bundle / "models/Q8_0.gguf").open("r+b") as file:
        file.write(b"X")
    _assert_untouched(root, _install(bundle, root), "models/Q8_0.gguf was changed")


def test_device_that_was_never_enrolled(package, root):
    (root / "etc/rl-pipeline/allowed_signers").unlink()
    _assert_untouched(root, _install(package.bundle, root), "enrolment")


def test_key_out_of_the_bundle_is_refused(package, root, tmp_path):
    bundle = Path(shutil.copytree(package.bundle, tmp_path / "bundle"))
    shutil.copy(package.pin, bundle / "allowed_signers")
    done = _install(bundle, root, "--allowed-signers", bundle / "allowed_signers")
    _assert_untouched(root, done, "never brings its own trust")


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("etc/nv_tegra_release", "# R35 (release), REVISION: 4.1, GCID: 1\n", "L4T 35.4.1"),
        ("etc/nv_tegra_release", "unknown\n", "nothing is guessed"),
        ("proc/meminfo", "MemAvailable: 1000 kB\n", "MemAvailable is 0 MiB"),
    ],
)
def test_a20_device_that_does_not_fit_is_refused(package, root, file, text, match):
    (root / file).write_text(text)
    _assert_untouched(root, _install(package.bundle, root), match)
    done = _install(package.bundle, root, "--skip-hardware")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--port", "0"],
        ["--port", "99999"],
        ["--port", "x; reboot"],
        ["--nonsense"],
        ["--port"],
        ["--python", "a b"],
        ["--root", "/nonexistent"],
    ],
)
def test_bad_options(package, root, options):
    done = _install(package.bundle, root, *options)
    assert done.returncode == 1
    assert not (root / "opt").exists()


def test_the_installed_verifier_judges_the_next_bundle(package, root, tmp_path):
    """A bundle whose own verifier says yes to everything gets nowhere on a device with another."""
    assert _install(package.bundle, root).returncode == 0
    evil = Path(shutil.copytree(package.bundle, tmp_path / "evil"))
    (evil / "verify.py").write_text("raise SystemExit(0)\n")
    (evil / "NOTICE").write_text("evil")
    done = _install(evil, root)
    assert done.returncode == 1
    assert "REFUSED" in done.stderr
    assert os.readlink(_app(root) / "current") == f"releases/{_sha(package.bundle)}"


def test_uninstall_takes_all_but_the_pinned_key(package, root):
    assert _install(package.bundle, root).returncode == 0
    command = [_app(root) / "current/uninstall.sh", "--root", root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    left = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    assert left == ["etc/nv_tegra_release", "etc/rl-pipeline/allowed_signers", "proc/meminfo"]
    again = subprocess.run(
        [package.bundle / "uninstall.sh", "--root", root],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, "is not installed" in again.stderr) == (1, True)


@pytest.mark.parametrize("name", ["..", "a/b", "", "-x"])
def test_uninstall_refuses_a_name_that_is_a_path(package, root, name):
    command = [package.bundle / "uninstall.sh", "--root", root, "--name", name or "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert root.exists()


def _scripts():
    return sorted(Path("deployment/jetson/on_device").glob("*.sh"))


@pytest.mark.parametrize("script", _scripts(), ids=lambda p: p.name)
def test_scripts_parse_and_are_executable(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", ["install.sh", "uninstall.sh", "smoke.sh", "preflight.sh"])
def test_scripts_explain_themselves(package, script):
    done = subprocess.run(
        [package.bundle / script, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--" in done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(package, root, tmp_path):
    assert _install(package.bundle, root).returncode == 0
    unit = (root / "etc/systemd/system/rl-pipeline-agent.service").read_text()
    (tmp_path / "rl-pipeline-agent.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "rl-pipeline-agent.service"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "rl-pipeline-agent" in line]
    assert ours == [], done.stderr


def test_unit_only_writes_the_unit_and_nothing_else(package, root):
    assert _install(package.bundle, root).returncode == 0
    unit = root / "etc/systemd/system/rl-pipeline-agent.service"
    assert "--port 8080" in unit.read_text()
    links = sorted(os.listdir(_app(root)))
    assert _install(package.bundle, root, "--unit-only", "--port", "9090").returncode == 0
    assert "--port 9090" in unit.read_text()
    assert sorted(os.listdir(_app(root))) == links
    shutil.rmtree(_app(root))
    done = _install(package.bundle, root, "--unit-only")
    assert (done.returncode, "names no release" in done.stderr) == (1, True)
