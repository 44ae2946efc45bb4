"""The service of an agent: the supervisor for real, systemd through a stand-in of `systemctl`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployment.fleet.on_device import keep_alive
from deployment.fleet.on_device.keep_alive import started_ticks
from deployment.fleet.on_device.places import DeviceError, Places
from deployment.fleet.on_device.service import Service

SOURCE = Path(keep_alive.__file__).read_text(encoding="utf-8")
SLEEPER = """import os, pathlib, time
pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
"""


def _service(root, agent_code, scope="process"):
    places = Places(str(root), "agent")
    release = places.releases / ("a" * 12)
    release.mkdir(parents=True, exist_ok=True)
    (release / "agent.py").write_text(agent_code)
    places.link("current", "a" * 12)
    return Service(places, scope, sys.executable, 1, SOURCE)


def _wait(condition, limit_s=20.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


def _agent_pid(service):
    path = service.places.app / "current/pid"
    _wait(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_supervisor_starts_restarts_and_stops(tmp_path):
    service = _service(tmp_path, SLEEPER + "time.sleep(600)\n")
    assert not service.alive()
    service.stop()  # nothing runs: nothing to do
    service.restart()
    first, supervisor = _agent_pid(service), service._supervisor()
    assert service.alive() and started_ticks(first) is not None
    os.kill(first, signal.SIGKILL)
    _wait(lambda: _agent_pid(service) != first)
    assert service._supervisor() == supervisor
    second = _agent_pid(service)
    service.restart()
    _wait(lambda: _agent_pid(service) != second)
    assert started_ticks(second) is None and started_ticks(supervisor) is None
    third = _agent_pid(service)
    service.stop()
    assert not service.alive() and started_ticks(third) is None


def test_agent_dies_with_its_supervisor(tmp_path):
    service = _service(tmp_path, SLEEPER + "time.sleep(600)\n")
    service.restart()
    agent, supervisor = _agent_pid(service), service._supervisor()
    os.kill(supervisor, signal.SIGKILL)
    _wait(lambda: started_ticks(agent) is None)
    assert not service.alive()
    service.stop()


def test_supervisor_gives_up_on_an_agent_that_will_not_start(tmp_path, monkeypatch):
    source = SOURCE.replace("_PAUSE_S = 1.0", "_PAUSE_S = 0.01")
    monkeypatch.setitem(globals(), "SOURCE", source)
    service = _service(tmp_path, "raise SystemExit('no model')\n")
    service.restart()
    _wait(lambda: not service.alive())
    assert service.last_words().count("no model") == 3
    assert service.last_words().endswith("giving up\n")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1, "started_ticks": 1}', '{"pid": "x"}'])
def test_stale_or_broken_pid_file_is_nobody(tmp_path, text):
    """Process 1 did not start at tick 1: a reused process id is never taken for the supervisor."""
    service = _service(tmp_path, "")
    service.places.run.mkdir()
    (service.places.run / "supervisor.json").write_text(text)
    assert not service.alive()
    service.stop()


def test_scope_that_is_not_known(tmp_path):
    with pytest.raises(DeviceError, match="is none of systemd, process"):
        _service(tmp_path, "", scope="docker")


@pytest.fixture
def systemctl(tmp_path, monkeypatch):
    """A stand-in: writes down how it was called; `fail` names a word it fails at."""
    tools = tmp_path / "bin"
    tools.mkdir()
    program = tools / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f'if [ -e {tmp_path}/fail ] && [ "$1" = "$(cat {tmp_path}/fail)" ]; then\n'
        f'  echo "Job failed" >&2; exit 1\nfi\n'
        f'[ "$1" = is-active ] && cat {tmp_path}/state\nexit 0\n'
    )
    program.chmod(0o755)
    (tmp_path / "state").write_text("active\n")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return lambda: (tmp_path / "calls").read_text().splitlines()


def test_systemd_unit_is_written_and_restarted(tmp_path, package, systemctl):
    root = tmp_path / "root"
    root.mkdir()
    service = _service(root, "", scope="systemd")
    release = service.places.app / "current"
    for name in ("install.sh", "manifest.json", "agent.service"):
        shutil.copy(package.bundle / name, release / name)
    service.restart()
    unit = "rl-pipeline-agent.service"
    assert systemctl() == [
        "daemon-reload",
        f"enable {unit}",
        f"reset-failed {unit}",
        f"restart {unit}",
    ]
    text = (root / "etc/systemd/system" / unit).read_text()
    assert f"--python {sys.executable}" in text and "--port 1 " in text + " "
    assert service.alive()
    (tmp_path / "state").write_text("failed\n")
    assert not service.alive()
    service.stop()
    assert systemctl()[-1] == f"stop {unit}"
    (tmp_path / "fail").write_text("restart")
    with pytest.raises(DeviceError, match=r"starting the service failed .*Job failed"):
        service.restart()
    (tmp_path / "fail").write_text("reset-failed")  # a unit that never failed is no error
    service.restart()


def test_keep_alive_as_it_is_left_on_a_device_is_standard_library(tmp_path):
    script = tmp_path / "keep_alive.py"
    script.write_text(SOURCE)
    command = [sys.executable, "-I", "-S", str(script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "--app" in done.stdout) == (0, True), done.stderr
    assert json.dumps(started_ticks(1)) != "null" and started_ticks(1 << 30) is None
