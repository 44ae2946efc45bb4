"""One device over a real sshd: what a deployment leaves there when it works and when it fails."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from conftest import CONFIG

from deployment.fleet.cargo import loaded
from deployment.fleet.device import Visit
from deployment.fleet.on_device.keep_alive import started_ticks
from deployment.fleet.ssh import Shell
from tests.flows.loopback_devices import LIAR, device_calls

pytestmark = pytest.mark.needs("sshd")


def _releases(device):
    return sorted(p.name for p in (device.app / "releases").iterdir())


def _visit(device, known_hosts, said, sent=None):
    shell = Shell(device.config(), known_hosts)
    return Visit(shell, CONFIG, said.append, sent or (lambda done, size: None))


def test_golden_prompts_that_fail_never_reach_the_port(device, releases, deploy_to):
    """With memory for two, the new release is asked before anything is switched."""
    device.available()
    supervisor = (device.app / "run/supervisor.json").read_bytes()
    result, said = deploy_to(device, releases.spoilt, releases.pin)
    assert (result.outcome, result.error) == ("failed", "UnhealthyReleaseError")
    assert "prompt ids: token 0" in result.reason
    assert result.serving == releases.sha(releases.one)
    assert "switching" not in said
    assert (device.app / "run/supervisor.json").read_bytes() == supervisor  # never restarted


def test_golden_prompts_that_fail_after_the_switch_bring_the_old_back(device, releases, deploy_to):
    """With memory for one, the new release is first asked when it serves."""
    result, said = deploy_to(device, releases.spoilt, releases.pin)
    assert (result.outcome, result.error) == ("failed", "UnhealthyReleaseError"), result
    assert "switching" in said and "golden prompts beside the running release" not in said
    one = releases.sha(releases.one)
    assert f"{one[:12]} serves again" in result.reason
    assert result.serving == one


def test_too_slow_goes_back(device, releases, deploy_to):
    result, _ = deploy_to(device, releases.two, releases.pin, min_tokens_per_s=1e9)
    assert (result.outcome, result.error) == ("failed", "TooSlowError"), result
    assert "nvpmodel" in result.reason


def test_signature_of_a_foreign_key_is_refused_on_the_device(device, releases, deploy_to):
    """The machine that deploys believes the key, the device does not: the device has the word."""
    before = _releases(device)
    result, _ = deploy_to(device, releases.foreign, releases.foreign_pin)
    assert (result.outcome, result.error) == ("failed", "BundleRefusedError"), result
    assert "not a good signature by a key in" in result.reason
    assert _releases(device) == before
    assert list((device.app / "incoming").glob("*-*")) == []


def test_release_damaged_on_the_device_is_not_activated(device, releases, known_hosts):
    """Sixty-four digits that lie there but do not verify are brought again, never switched to."""
    said = []
    with loaded(releases.two, releases.pin) as cargo:
        visit = _visit(device, known_hosts, said)
        with visit.shell:
            visit.bring(cargo)
            folder = device.app / "releases" / cargo.sha12
            (folder / "NOTICE").write_text("damaged")
            result = visit.rollback("agent", target=cargo.release)
            assert (result.outcome, result.error) == ("failed", "BundleRefusedError"), result
            visit.bring(cargo)
            assert (folder / "NOTICE").read_text() == "second"


def test_device_that_was_never_enrolled(device, releases, deploy_to, tmp_path):
    pin = device.root / "etc/rl-pipeline/allowed_signers"
    kept = shutil.move(pin, tmp_path / "pin")
    try:
        result, _ = deploy_to(device, releases.one, releases.pin)
    finally:
        shutil.move(kept, pin)
    assert result.error == "NotEnrolledError"
    assert "devices enrol one" in result.reason


def test_cut_connection_resumes_where_it_stopped(
    device, releases, known_hosts, short_pauses, monkeypatch
):
    monkeypatch.setattr("deployment.fleet.remote.CHUNK", 16_384)
    cuts, said = [], []

    def cut(done, size):
        """Cut once the first bytes lie on the device's disk."""
        while not cuts and not (part.exists() and part.stat().st_size):
            time.sleep(0.01)
        if not cuts:
            cuts.append(device.cut())

    with loaded(releases.two, releases.pin) as cargo:
        size = cargo.archive.stat().st_size
        part = device.app / "incoming" / f"{cargo.archive_sha256}.part"
        visit = _visit(device, known_hosts, said, cut)
        with visit.shell:
            visit.bring(cargo)
    assert cuts[0] > 0, "nothing was cut"
    assert any("trying again" in line for line in said)
    assert [line for line in said if line.startswith("going on at byte")], said
    assert visit.sent_bytes < size


def test_partial_archive_is_gone_on_with_and_a_wrong_one_sent_anew(device, releases, known_hosts):
    incoming, said = device.app / "incoming", []
    with loaded(releases.two, releases.pin) as cargo:
        part, whole = incoming / f"{cargo.archive_sha256}.part", cargo.archive.read_bytes()
        for begin, sent in ((whole[:1000], len(whole) - 1000), (b"x" * 1000, len(whole))):
            part.write_bytes(begin)
            (incoming / f"{'0' * 64}.part").write_bytes(b"of another day")
            visit = _visit(device, known_hosts, said)
            with visit.shell:
                visit.bring(cargo)
            assert visit.sent_bytes == sent
            assert list(incoming.iterdir()) == []
            shutil.rmtree(device.app / "releases" / cargo.sha12)
    assert f"going on at byte 1,000 of {len(whole):,}" in said
    assert "what lies there is not the beginning of this archive; sending it anew" in said


def test_device_that_stays_away_keeps_its_old_release(device, releases, deploy_to, short_pauses):
    result, _ = deploy_to(device, releases.two, releases.pin, sent=lambda done, size: device.stop())
    assert (result.outcome, result.error, result.serving) == ("failed", "ConnectionLostError", None)
    assert "what has arrived is kept" in result.reason.lower()
    assert device.serves() == releases.sha(releases.one)


def test_full_disk_in_the_middle_is_named(device, releases, deploy_to):
    """RLIMIT_FSIZE: the archive grows to a limit and no further."""
    device.stop()
    device.limit_bytes = 60_000
    device.start()
    try:
        result, _ = deploy_to(device, releases.two, releases.pin)
    finally:
        device.stop()
        device.limit_bytes = None
    assert (result.outcome, result.error) == ("failed", "DiskFullError"), result
    assert "Free some space" in result.reason
    assert result.serving == releases.sha(releases.one)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_disk_without_room_is_found_before_anything_is_sent(device, releases, deploy_to):
    folder = str(device.app / "incoming")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        result, _ = deploy_to(device, releases.two, releases.pin)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert (result.error, result.sent_bytes) == ("DiskFullError", 0)
    assert "the bundle does not fit" in result.reason and "bytes are needed" in result.reason


def test_killed_install_returns_to_the_old_release(device, releases, deploy_to, short_pauses):
    """`kill -9` of the device's side right after the switch; other points are in tests/faults."""
    two, killed = releases.sha(releases.two), []

    def kill_there():
        end_s = time.monotonic() + 60
        while device.current() != two[:12] and time.monotonic() < end_s:
            time.sleep(0.005)
        for pid in device_calls(device):
            os.kill(pid, 9)
            killed.append(pid)

    thread = threading.Thread(target=kill_there)
    thread.start()
    result, said = deploy_to(device, releases.two, releases.pin)
    thread.join()
    assert killed, "the test came too late to kill anything"
    assert (result.outcome, result.error) == ("failed", "ConnectionLostError"), (result, said)
    assert f"{releases.sha(releases.one)[:12]} serves again" in result.reason


def test_device_that_lies_about_its_version_is_caught(device, releases, deploy_to):
    """Its own side claims success and does nothing; the endpoint, asked from here, tells."""
    device.stop()
    device.wrapper = LIAR
    device.start()
    try:
        result, _ = deploy_to(device, releases.two, releases.pin)
    finally:
        device.stop()
        device.wrapper = None
    one = releases.sha(releases.one)
    assert (result.outcome, result.error) == ("failed", "WrongReleaseError"), result
    assert f"endpoint serves {one[:12]}" in result.reason
    assert result.serving == one


def test_port_held_by_something_else_is_not_taken_for_the_release(device, releases, deploy_to):
    """A supervisor nobody remembers goes on serving the old release on the port."""
    path = device.app / "run/supervisor.json"
    remembered = path.read_bytes()
    path.unlink()
    try:
        result, _ = deploy_to(device, releases.two, releases.pin)
    finally:
        path.write_bytes(remembered)
    assert (result.outcome, result.error) == ("failed", "WrongReleaseError"), result
    assert "something else holds it" in result.reason
    pid = json.loads(remembered)["pid"]
    assert started_ticks(pid) == json.loads(remembered)["started_ticks"]


def test_busy_device_is_left_alone(device, releases, deploy_to, short_pauses):
    command = ["flock", str(device.app / ".lock"), "sleep", "60"]
    holder = subprocess.Popen(command, start_new_session=True)
    try:
        time.sleep(0.3)
        result, _ = deploy_to(device, releases.two, releases.pin)
    finally:
        os.killpg(holder.pid, 9)
        holder.wait()
    assert result.error == "DeviceBusyError", result


@pytest.mark.parametrize("expected", ["35", "36.3"])
def test_a20_wrong_l4t_is_the_wrong_device(device, releases, deploy_to, expected):
    result, _ = deploy_to(device, releases.two, releases.pin, l4t=expected)
    assert result.error == "WrongDeviceError"
    assert f"runs L4T 36.4.3, the file of devices expects {expected}" in result.reason


def test_runtime_that_is_missing_is_found_before_the_switch(device, releases, deploy_to, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')
    bare.chmod(0o755)
    result, said = deploy_to(device, releases.two, releases.pin, python=str(bare))
    assert result.error == "PreflightFailedError", result
    assert "llama-cpp-python" in result.reason and "switching" not in said
