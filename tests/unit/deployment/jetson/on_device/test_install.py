"""install.sh on a staged root; the shell scripts' own hygiene, and the unit's."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from staged_root import app, bundle_sha, install, root

from deployment.jetson.signing import sign, signing_key
from tasks.artifacts import hash_file

__all__ = ["root"]


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


def test_install_places_release_link_and_unit(package, root):
    done = install(package.bundle, root)
    assert done.returncode == 0, done.stderr
    sha = bundle_sha(package.bundle)
    assert os.readlink(app(root) / "current") == f"releases/{sha}"
    assert not (app(root) / "previous").exists()
    unit = (root / "etc/systemd/system/rl-pipeline-agent.service").read_text()
    assert not re.search(r"@[A-Z]+@", unit.partition("[Unit]")[2])
    assert f"--python {sys.executable}" in unit
    assert "/opt/rl-pipeline/agent/current/agent.py" in unit
    assert str(root) not in unit
    assert [p.name for p in (app(root) / "releases").iterdir()] == [sha]


def test_installing_twice_changes_nothing(package, root):
    assert install(package.bundle, root).returncode == 0
    before = (app(root) / "current/manifest.json").stat().st_ino
    assert install(package.bundle, root).returncode == 0
    assert (app(root) / "current/manifest.json").stat().st_ino == before
    assert not (app(root) / "previous").exists()


def test_two_releases_are_kept_and_older_ones_go(package, facts, root, tmp_path):
    bundles = [
        package.bundle,
        _variant(package, facts, tmp_path / "b", _note("second")),
        _variant(package, facts, tmp_path / "c", _note("third")),
    ]
    for bundle in bundles:
        done = install(bundle, root)
        assert done.returncode == 0, done.stderr
    assert os.readlink(app(root) / "current") == f"releases/{bundle_sha(bundles[2])}"
    assert os.readlink(app(root) / "previous") == f"releases/{bundle_sha(bundles[1])}"
    kept = sorted(p.name for p in (app(root) / "releases").iterdir())
    assert kept == sorted(bundle_sha(b) for b in bundles[1:])


def test_release_that_fails_its_smoke_test_is_taken_back(package, facts, root, tmp_path):
    assert install(package.bundle, root, "--smoke").returncode == 0
    bad = _variant(package, facts, tmp_path / "bad", _spoil_golden)
    done = install(bad, root, "--smoke")
    assert done.returncode == 1
    assert "prompt ids: token 0" in done.stderr
    assert f"{bundle_sha(package.bundle)} is current again" in done.stderr
    assert os.readlink(app(root) / "current") == f"releases/{bundle_sha(package.bundle)}"
    assert [p.name for p in (app(root) / "releases").iterdir()] == [bundle_sha(package.bundle)]


def test_damaged_copy_on_the_device_is_replaced(package, root):
    assert install(package.bundle, root).returncode == 0
    (app(root) / "current/NOTICE").write_text("damaged")
    done = install(package.bundle, root)
    assert done.returncode == 0, done.stderr
    assert "was damaged; it is replaced" in done.stderr
    assert (app(root) / "current/NOTICE").read_bytes() == (package.bundle / "NOTICE").read_bytes()


def _assert_untouched(root, done, match):
    assert done.returncode == 1
    assert match in done.stderr
    assert "nothing was changed" in done.stderr
    assert not (root / "opt").exists()


def test_changed_bundle_is_refused(package, root, tmp_path):
    bundle = Path(shutil.copytree(package.bundle, tmp_path / "bundle"))
    with (bundle / "models/Q8_0.gguf").open("r+b") as file:
        file.write(b"X")
    _assert_untouched(root, install(bundle, root), "models/Q8_0.gguf was changed")


def test_device_that_was_never_enrolled(package, root):
    (root / "etc/rl-pipeline/allowed_signers").unlink()
    _assert_untouched(root, install(package.bundle, root), "enrolment")


def test_key_out_of_the_bundle_is_refused(package, root, tmp_path):
    bundle = Path(shutil.copytree(package.bundle, tmp_path / "bundle"))
    shutil.copy(package.pin, bundle / "allowed_signers")
    done = install(bundle, root, "--allowed-signers", bundle / "allowed_signers")
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
    _assert_untouched(root, install(package.bundle, root), match)
    done = install(package.bundle, root, "--skip-hardware")
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
    done = install(package.bundle, root, *options)
    assert done.returncode == 1
    assert not (root / "opt").exists()


def test_the_installed_verifier_judges_the_next_bundle(package, root, tmp_path):
    """A bundle whose own verifier says yes to everything gets nowhere on a device with another."""
    assert install(package.bundle, root).returncode == 0
    evil = Path(shutil.copytree(package.bundle, tmp_path / "evil"))
    (evil / "verify.py").write_text("raise SystemExit(0)\n")
    (evil / "NOTICE").write_text("evil")
    done = install(evil, root)
    assert done.returncode == 1
    assert "REFUSED" in done.stderr
    assert os.readlink(app(root) / "current") == f"releases/{bundle_sha(package.bundle)}"


def test_api_key_is_made_once_and_only_its_owner_reads_it(package, root):
    assert install(package.bundle, root).returncode == 0
    path = root / "etc/rl-pipeline/api_key"
    key = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(key.strip()) == 43  # 32 random bytes
    assert install(package.bundle, root).returncode == 0
    assert path.read_text() == key
    unit = (root / "etc/systemd/system/rl-pipeline-agent.service").read_text()
    assert "--api-key-file /etc/rl-pipeline/api_key" in unit


def _scripts():
    return sorted(Path("deployment/jetson/on_device").glob("*.sh"))


@pytest.mark.parametrize("script", _scripts(), ids=lambda p: p.name)
def test_scripts_parse_and_are_executable(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


SCRIPTS = ["install.sh", "uninstall.sh", "smoke.sh", "preflight.sh", "build_llama_server.sh"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_explain_themselves(package, script):
    done = subprocess.run(
        [package.bundle / script, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--" in done.stdout


MOST_EXPOSED = 2.0
"""`systemd-analyze security` of the unit: 1.5 was measured; a service without any is at 9.6."""


def _unit_with_drop_in(package, root, folder):
    assert install(package.bundle, root).returncode == 0
    path = folder / "rl-pipeline-agent.service"
    path.write_text((root / "etc/systemd/system/rl-pipeline-agent.service").read_text())
    drop_in = folder / "rl-pipeline-agent.service.d"
    drop_in.mkdir()
    shutil.copy(package.bundle / "headless.conf", drop_in)
    return path


@pytest.mark.needs("systemd-analyze")
def test_systemd_accepts_the_unit_and_its_drop_in(package, root, tmp_path):
    path = _unit_with_drop_in(package, root, tmp_path)
    command = ["systemd-analyze", "verify", "--man=no", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "rl-pipeline-agent" in line]
    assert ours == [], done.stderr


@pytest.mark.needs("systemd-analyze")
def test_unit_is_hardened(package, root, tmp_path, record_property):
    path = _unit_with_drop_in(package, root, tmp_path)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert score, done.stderr
    record_property("exposure", float(score[1]))
    assert float(score[1]) <= MOST_EXPOSED, done.stdout
    unit = path.read_text()
    assert "PrivateDevices" not in re.sub("^#.*$", "", unit, flags=re.MULTILINE)  # hides the GPU
