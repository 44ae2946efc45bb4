"""install.sh and uninstall.sh on a staged root; the shell scripts' own hygiene."""

import json
import os
import re
import shutil
import stat
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
    assert not re.search(r"@[A-Z]+@", unit.partition("[Unit]")[2])
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


DEVICE_FILES = ["etc/nv_tegra_release", "proc/meminfo"]


def _uninstall(root, *options, script=None):
    script = script or _app(root) / "current/uninstall.sh"
    command = [script, "--root", root, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _left(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


def _write_field_rows(root, name="agent"):
    folder = root / "var/lib/rl-pipeline/field"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-000001.jsonl").write_text("{}\n")


def test_api_key_is_made_once_and_only_its_owner_reads_it(package, root):
    assert _install(package.bundle, root).returncode == 0
    path = root / "etc/rl-pipeline/api_key"
    key = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(key.strip()) == 43  # 32 random bytes
    assert _install(package.bundle, root).returncode == 0
    assert path.read_text() == key
    unit = (root / "etc/systemd/system/rl-pipeline-agent.service").read_text()
    assert "--api-key-file /etc/rl-pipeline/api_key" in unit


def test_uninstall_leaves_nothing(package, root):
    assert _install(package.bundle, root).returncode == 0
    _write_field_rows(root)
    done = _uninstall(root)
    assert done.returncode == 0, done.stderr
    assert _left(root) == DEVICE_FILES
    folders = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir()}
    assert folders <= {"etc", "proc", "opt", "var", "var/lib", "etc/systemd", "etc/systemd/system"}
    again = _uninstall(root, script=package.bundle / "uninstall.sh")
    assert (again.returncode, "is not installed" in again.stderr) == (1, True)


def test_uninstall_keeps_data_and_enrolment_if_asked(package, root):
    assert _install(package.bundle, root).returncode == 0
    _write_field_rows(root)
    assert _uninstall(root, "--keep-data").returncode == 0
    kept = ["etc/nv_tegra_release", "etc/rl-pipeline/allowed_signers", "etc/rl-pipeline/api_key"]
    assert _left(root) == [*kept, "proc/meminfo", "var/lib/rl-pipeline/field/agent-000001.jsonl"]
    assert _install(package.bundle, root).returncode == 0  # still enrolled


def test_uninstall_of_one_agent_leaves_the_other(package, root):
    assert _install(package.bundle, root).returncode == 0
    (root / "opt/rl-pipeline/other/releases").mkdir(parents=True)
    _write_field_rows(root)
    _write_field_rows(root, "other")
    (root / "opt/rl-pipeline-runtime").mkdir()
    done = _uninstall(root, "--runtime")
    assert done.returncode == 0, done.stderr
    assert "the model server stays" in done.stderr
    assert (root / "opt/rl-pipeline/other/releases").is_dir()
    assert (root / "opt/rl-pipeline-runtime").is_dir()
    assert (root / "etc/rl-pipeline/allowed_signers").exists()
    rows = root / "var/lib/rl-pipeline/field"
    assert [p.name for p in rows.iterdir()] == ["other-000001.jsonl"]


def test_uninstall_takes_the_model_server_if_asked(package, root):
    assert _install(package.bundle, root).returncode == 0
    (root / "opt/rl-pipeline-runtime/bin").mkdir(parents=True)
    assert _uninstall(root).returncode == 0
    assert (root / "opt/rl-pipeline-runtime/bin").is_dir()
    assert _install_again_and_remove(package, root)
    assert not (root / "opt/rl-pipeline-runtime").exists()


def _install_again_and_remove(package, root):
    (root / "etc/rl-pipeline").mkdir()
    shutil.copy(package.pin, root / "etc/rl-pipeline/allowed_signers")
    assert _install(package.bundle, root).returncode == 0
    return _uninstall(root, "--runtime").returncode == 0


def test_uninstall_ends_an_agent_that_runs_without_systemd(package, root):
    """Only a process that is the supervisor: a pid that now belongs to another is left alone."""
    assert _install(package.bundle, root).returncode == 0
    run = _app(root) / "run"
    run.mkdir()
    (run / "keep_alive.py").write_text("import time; time.sleep(60)")
    command = [sys.executable, str(run / "keep_alive.py")]
    supervisor, other = subprocess.Popen(command), subprocess.Popen(["sleep", "60"])
    try:
        (run / "supervisor.json").write_text(json.dumps({"pid": supervisor.pid}))
        assert _uninstall(root, "--keep-data").returncode == 0
        assert supervisor.wait(timeout=10) == -15
        assert _install(package.bundle, root).returncode == 0
        run.mkdir()
        (run / "supervisor.json").write_text(json.dumps({"pid": other.pid}))
        assert _uninstall(root).returncode == 0
        assert other.poll() is None
    finally:
        for process in (supervisor, other):
            process.kill()
            process.wait()


def _with_targets(root):
    """The targets a root of systemd has; an empty file would count as masked."""
    units = root / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for name in ("multi-user.target", "graphical.target"):
        (units / name).write_text("[Unit]\nDescription=x\n")
    (units / "default.target").symlink_to("graphical.target")
    return root / "etc/systemd/system"


def _default_target(root):
    command = ["systemctl", f"--root={root}", "get-default"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.needs("systemctl")
def test_headless_mode_and_back(package, root):
    units = _with_targets(root)
    assert _default_target(root) == "graphical.target"
    for _ in range(2):  # the second time must not forget what was before
        done = _install(package.bundle, root, "--headless")
        assert done.returncode == 0, done.stderr
        assert _default_target(root) == "multi-user.target"
    drop_in = units / "rl-pipeline-agent.service.d/headless.conf"
    assert "Conflicts=display-manager.service" in drop_in.read_text()
    assert _uninstall(root).returncode == 0
    assert _default_target(root) == "graphical.target"
    assert not drop_in.parent.exists()


@pytest.mark.needs("systemctl")
def test_device_that_had_no_desktop_stays_so(package, root):
    _with_targets(root)
    command = ["systemctl", f"--root={root}", "set-default", "multi-user.target"]
    subprocess.run(command, check=True, capture_output=True)
    assert _install(package.bundle, root, "--headless").returncode == 0
    assert _uninstall(root).returncode == 0
    assert _default_target(root) == "multi-user.target"


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
    assert _install(package.bundle, root).returncode == 0
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
