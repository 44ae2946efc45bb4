"""Host keys, SSH keys and hosts that are not as they should be; enrolment."""

import os

import pytest

from configs.schema.devices import Device
from deployment.fleet import errors
from deployment.fleet.enrol import (
    choose_host_key,
    enrol,
    fingerprint,
    not_enrolled,
    offered,
    pin_host_key,
)
from deployment.fleet.remote import Remote
from deployment.fleet.ssh import Shell, check_identity, known_names, scan_host_keys
from tests.flows.loopback_devices import make_key

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
KEY_PRINT = "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"  # by ssh-keygen -l
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMZtgAHfYkuaAxTt7bIn5vYoXy8m2bBz5aaOI+g4uJ1v"


def _ask(device, known_hosts):
    with Shell(device, known_hosts) as shell:
        return Remote(shell).call("facts")


def test_fingerprint_is_what_ssh_keygen_shows():
    assert fingerprint(KEY) == KEY_PRINT
    for bad in ("", "ssh-ed25519", "ssh-ed25519 !"):
        with pytest.raises(errors.WrongHostKeyError, match="not a public key"):
            fingerprint(bad)


def test_pinning_a_host_key(tmp_path):
    path = tmp_path / "deep/known_hosts"
    assert pin_host_key(path, "one", KEY, replace=False)
    assert not pin_host_key(path, "one", KEY, replace=False)
    assert pin_host_key(path, "two", OTHER, replace=False)
    with pytest.raises(errors.WrongHostKeyError, match=r"another host key.*--replace-host-key"):
        pin_host_key(path, "one", OTHER, replace=False)
    assert known_names(path) == {"one": (KEY,), "two": (OTHER,)}
    assert pin_host_key(path, "one", OTHER, replace=True)
    assert known_names(path) == {"one": (OTHER,), "two": (OTHER,)}
    devices = [Device(name=name, host="h") for name in ("one", "three")]
    assert not_enrolled(devices, path) == ["three"]
    assert not_enrolled(devices, tmp_path / "none") == ["one", "three"]


def test_ssh_key_that_cannot_be_used(tmp_path):
    key = make_key(tmp_path / "id")
    device = Device(name="one", host="h", identity=str(key))
    assert check_identity(device) == key
    key.chmod(0o644)
    with pytest.raises(errors.LoginRefusedError, match="chmod 600"):
        check_identity(device)
    key.unlink()
    with pytest.raises(errors.LoginRefusedError, match="no key file there"):
        check_identity(device)
    device = Device(name="one", host="h", identity="env:NOT_SET")
    with pytest.raises(errors.LoginRefusedError, match="NOT_SET is not set"):
        check_identity(device, {})


def test_no_such_host_and_nobody_there(tmp_path):
    pin_host_key(tmp_path / "known", "one", KEY, replace=False)
    nowhere = Device(name="one", host="no-such-host.invalid")
    with pytest.raises(errors.NoSuchHostError, match="correct `host`"):
        _ask(nowhere, tmp_path / "known")
    with pytest.raises((errors.NoSuchHostError, errors.UnreachableError)):
        scan_host_keys(nowhere)
    closed = Device(name="one", host="127.0.0.1", port=1)
    with pytest.raises(errors.UnreachableError, match="nothing listens there"):
        _ask(closed, tmp_path / "known")


@pytest.mark.needs("sshd")
def test_enrolment_and_host_keys_over_a_real_sshd(device, releases, known_hosts, tmp_path):
    config, mine = device.config(), tmp_path / "known"
    with pytest.raises(errors.WrongHostKeyError, match="not pinned"):
        _ask(config, mine)
    keys = offered(config)
    with pytest.raises(errors.WrongHostKeyError, match="has no host key SHA256:other; it shows"):
        choose_host_key(config, keys, "SHA256:other")
    (key,) = keys.values()
    done = enrol(config, mine, key, releases.pin)
    assert (done.host_key_changed, done.signing_key_changed) == (True, False)
    assert enrol(config, mine, key, releases.pin).host_key_changed is False
    with pytest.raises(errors.OtherKeyPinnedError, match="--replace-key"):
        enrol(config, mine, key, releases.foreign_pin)
    pinned = (device.root / "etc/rl-pipeline/allowed_signers").read_text()
    assert pinned == releases.pin.read_text()
    assert enrol(config, mine, key, releases.foreign_pin, replace_key=True).signing_key_changed
    assert enrol(config, mine, key, releases.pin, replace_key=True).signing_key_changed
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    with pytest.raises(errors.DeviceFailedError, match="empty or too long"):
        enrol(config, mine, key, empty)

    other = "ssh-ed25519 " + make_key(tmp_path / "k").with_suffix(".pub").read_text().split()[1]
    pin_host_key(tmp_path / "wrong", "one", other, replace=False)
    with pytest.raises(errors.WrongHostKeyError, match="another machine answers"):
        _ask(config, tmp_path / "wrong")
    stranger = make_key(tmp_path / "stranger")
    with pytest.raises(errors.LoginRefusedError, match="authorized_keys"):
        _ask(device.config(identity=str(stranger)), known_hosts)
    with pytest.raises(errors.DeviceFailedError, match="is not a folder on the device"):
        _ask(device.config(root="/no/such/root"), known_hosts)


@pytest.mark.needs("sshd")
def test_nothing_of_a_connection_is_left(device, known_hosts):
    with Shell(device.config(), known_hosts) as shell:
        Remote(shell).call("facts")
        folder = shell._folder
        assert os.listdir(folder)
    assert not os.path.exists(folder)
