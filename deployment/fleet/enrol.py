"""Enrolment: whose host key a device has, and whose bundles it takes. Once, by a person."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema.devices import Device
from deployment.fleet.errors import WrongHostKeyError
from deployment.fleet.remote import Remote, Say
from deployment.fleet.ssh import Shell, known_names, scan_host_keys
from tasks.artifacts import write_atomic


def fingerprint(key: str) -> str:
    """`SHA256:…` of a public key `type base64`, as `ssh-keygen -l` shows it.

    Raises:
        WrongHostKeyError: not a key.
    """
    try:
        blob = base64.b64decode(key.split()[1], validate=True)
    except (IndexError, binascii.Error):
        raise WrongHostKeyError(f"{key[:60]!r} is not a public key") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def offered(device: Device) -> dict[str, str]:
    """Fingerprint → host key of whoever answers; a person compares them with the device's own."""
    return {fingerprint(key): key for key in scan_host_keys(device)}


def choose_host_key(device: Device, keys: dict[str, str], wanted: str) -> str:
    """The offered key with this fingerprint.

    Raises:
        WrongHostKeyError: none has it.
    """
    if wanted not in keys:
        raise WrongHostKeyError(
            f"{device.name}: whoever answers at {device.host}:{device.port} has no host key "
            f"{wanted}; it shows {', '.join(sorted(keys))}. On the device itself: ssh-keygen -lf "
            "/etc/ssh/ssh_host_ed25519_key.pub"
        )
    return keys[wanted]


def pin_host_key(known_hosts: Path, device: str, key: str, *, replace: bool) -> bool:
    """Pin a device's host key under its name; True where that changed something.

    Raises:
        WrongHostKeyError: another key is pinned, and `replace` was not asked for.
    """
    pinned = known_names(known_hosts).get(device, ())
    if key in pinned:
        return False
    if pinned and not replace:
        raise WrongHostKeyError(
            f"{device} was enrolled with another host key ({fingerprint(pinned[0])}). If the "
            "device was installed anew, enrol it with --replace-host-key"
        )
    old = known_hosts.read_text(encoding="utf-8").splitlines() if known_hosts.is_file() else []
    kept = [line for line in old if line.split()[:1] != [device]]
    write_atomic(known_hosts, "".join(f"{line}\n" for line in [*kept, f"{device} {key}"]))
    return True


@dataclass(frozen=True)
class Enrolment:
    """What enrolling changed."""

    device: str
    host_key: str
    """Fingerprint."""
    host_key_changed: bool
    signing_key_changed: bool
    facts: dict[str, object]


def enrol(
    device: Device,
    known_hosts: Path,
    host_key: str,
    allowed_signers: Path,
    *,
    replace_host_key: bool = False,
    replace_key: bool = False,
    say: Say = lambda text: None,
) -> Enrolment:
    """Pin the host key here and the signing key there; again changes nothing.

    Raises:
        DeployError: named by what is wrong. The host key stays pinned where only the rest failed.
    """
    changed = pin_host_key(known_hosts, device.name, host_key, replace=replace_host_key)
    text = allowed_signers.read_text(encoding="utf-8")
    with Shell(device, known_hosts) as shell:
        remote = Remote(shell, say)
        pinned = remote.call("pin", text=text, replace=replace_key)
        facts = remote.call("facts")
    return Enrolment(device.name, fingerprint(host_key), changed, bool(pinned["changed"]), facts)


def not_enrolled(devices: Sequence[Device], known_hosts: Path) -> list[str]:
    """Devices that have no host key pinned."""
    known = known_names(known_hosts)
    return [device.name for device in devices if device.name not in known]
