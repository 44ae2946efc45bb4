"""uninstall.sh on a staged root: what goes, what stays, and what was before."""

import json
import shutil
import subprocess
import sys

import pytest
from staged_root import app, install, root, uninstall

__all__ = ["root"]

DEVICE_FILES = ["etc/nv_tegra_release", "proc/meminfo"]


def _left(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


def _write_field_rows(root, name="agent"):
    folder = root / "var/lib/rl-pipeline/field"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-000001.jsonl").write_text("{}\n")


def test_uninstall_leaves_nothing(package, root):
    assert install(package.bundle, root).returncode == 0
    _write_field_rows(root)
    done = uninstall(root)
    assert done.returncode == 0, done.stderr
    assert _left(root) == DEVICE_FILES
    folders = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir()}
    assert folders <= {"etc", "proc", "opt", "var", "var/lib", "etc/systemd", "etc/systemd/system"}
    again = uninstall(root, script=package.bundle / "uninstall.sh")
    assert (again.returncode, "is not installed" in again.stderr) == (1, True)


def test_uninstall_keeps_data_and_enrolment_if_asked(package, root):
    assert install(package.bundle, root).returncode == 0
    _write_field_rows(root)
    assert uninstall(root, "--keep-data").returncode == 0
    kept = ["etc/nv_tegra_release", "etc/rl-pipeline/allowed_signers", "etc/rl-pipeline/api_key"]
    assert _left(root) == [*kept, "proc/meminfo", "var/lib/rl-pipeline/field/agent-000001.jsonl"]
    assert install(package.bundle, root).returncode == 0  # still enrolled


def test_uninstall_of_one_agent_leaves_the_other(package, root):
    assert install(package.bundle, root).returncode == 0
    (root / "opt/rl-pipeline/other/releases").mkdir(parents=True)
    _write_field_rows(root)
    _write_field_rows(root, "other")
    (root / "opt/rl-pipeline-runtime").mkdir()
    done = uninstall(root, "--runtime")
    assert done.returncode == 0, done.stderr
    assert "the model server stays" in done.stderr
    assert (root / "opt/rl-pipeline/other/releases").is_dir()
    assert (root / "opt/rl-pipeline-runtime").is_dir()
    assert (root / "etc/rl-pipeline/allowed_signers").exists()
    rows = root / "var/lib/rl-pipeline/field"
    assert [p.name for p in rows.iterdir()] == ["other-000001.jsonl"]


def test_uninstall_takes_the_model_server_if_asked(package, root):
    assert install(package.bundle, root).returncode == 0
    (root / "opt/rl-pipeline-runtime/bin").mkdir(parents=True)
    assert uninstall(root).returncode == 0
    assert (root / "opt/rl-pipeline-runtime/bin").is_dir()
    assert _install_again_and_remove(package, root)
    assert not (root / "opt/rl-pipeline-runtime").exists()


def _install_again_and_remove(package, root):
    (root / "etc/rl-pipeline").mkdir()
    shutil.copy(package.pin, root / "etc/rl-pipeline/allowed_signers")
    assert install(package.bundle, root).returncode == 0
    return uninstall(root, "--runtime").returncode == 0


def test_uninstall_ends_an_agent_that_runs_without_systemd(package, root):
    """Only a process that is the supervisor: a pid that now belongs to another is left alone."""
    assert install(package.bundle, root).returncode == 0
    run = app(root) / "run"
    run.mkdir()
    (run / "keep_alive.py").write_text("import time; time.sleep(60)")
    command = [sys.executable, str(run / "keep_alive.py")]
    supervisor, other = subprocess.Popen(command), subprocess.Popen(["sleep", "60"])
    try:
        (run / "supervisor.json").write_text(json.dumps({"pid": supervisor.pid}))
        assert uninstall(root, "--keep-data").returncode == 0
        assert supervisor.wait(timeout=10) == -15
        assert install(package.bundle, root).returncode == 0
        run.mkdir()
        (run / "supervisor.json").write_text(json.dumps({"pid": other.pid}))
        assert uninstall(root).returncode == 0
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
        done = install(package.bundle, root, "--headless")
        assert done.returncode == 0, done.stderr
        assert _default_target(root) == "multi-user.target"
    drop_in = units / "rl-pipeline-agent.service.d/headless.conf"
    assert "Conflicts=display-manager.service" in drop_in.read_text()
    assert uninstall(root).returncode == 0
    assert _default_target(root) == "graphical.target"
    assert not drop_in.parent.exists()


@pytest.mark.needs("systemctl")
def test_device_that_had_no_desktop_stays_so(package, root):
    _with_targets(root)
    command = ["systemctl", f"--root={root}", "set-default", "multi-user.target"]
    subprocess.run(command, check=True, capture_output=True)
    assert install(package.bundle, root, "--headless").returncode == 0
    assert uninstall(root).returncode == 0
    assert _default_target(root) == "multi-user.target"


@pytest.mark.parametrize("name", ["..", "a/b", "", "-x"])
def test_uninstall_refuses_a_name_that_is_a_path(package, root, name):
    command = [package.bundle / "uninstall.sh", "--root", root, "--name", name or "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert root.exists()
