"""What is on a device: its agents, their releases, what is served; and the pinned key."""

import os
import platform
import shutil
from pathlib import Path

from deployment.fleet.on_device import probe
from deployment.fleet.on_device.journal import read_journal
from deployment.fleet.on_device.places import (
    APPS,
    NAME,
    PIN,
    DeviceError,
    Places,
    release_hash,
    sync_folder,
    write_whole,
)
from deployment.jetson.on_device.l4t import RELEASE_FILE, L4tError, parse_release_file

MAX_PIN_BYTES = 64 << 10


def facts(root: str, port: int) -> "dict[str, object]":
    """The device and every agent on it.

    Raises:
        DeviceError: the root is not a folder.
    """
    base = Path(root)
    if not base.is_dir():
        raise DeviceError("request", f"root {root} is not a folder on the device")
    apps = base / APPS
    names = sorted(p.name for p in apps.iterdir() if NAME.match(p.name)) if apps.is_dir() else []
    pin = base / PIN
    usage = shutil.disk_usage(apps if apps.is_dir() else base)
    return {
        "hostname": platform.node(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "l4t": _l4t(base),
        "free_bytes": usage.free,
        "ssh_keygen": shutil.which("ssh-keygen") is not None,
        "pin": pin.read_text(errors="replace") if pin.is_file() else None,
        "served": probe.served(port, base),
        "agents": {name: _agent(Places(root, name)) for name in names},
    }


def _l4t(base: Path) -> "str | None":
    try:
        return str(parse_release_file((base / RELEASE_FILE).read_text(encoding="utf-8")))
    except (OSError, L4tError, UnicodeDecodeError):
        return None


def _agent(places: Places) -> "dict[str, object]":
    journal = read_journal(places)
    current, previous = places.linked("current"), places.linked("previous")
    releases = sorted(p.name for p in places.releases.iterdir()) if places.releases.is_dir() else []
    return {
        "current": release_hash(places.release(current)) if current else None,
        "previous": release_hash(places.release(previous)) if previous else None,
        "good": journal["good"],
        "trying": journal["trying"],
        "releases": releases,
    }


def pin_key(root: str, text: str, replace: bool) -> "dict[str, object]":
    """Pin the key that bundles must be signed by; another one that is pinned stays unless told.

    Raises:
        DeviceError: `other_pin`, or the disk refused.
    """
    if not text.strip() or len(text) > MAX_PIN_BYTES:
        raise DeviceError("request", "the key file is empty or too long")
    path = Path(root) / PIN
    there = path.read_text(errors="replace") if path.is_file() else None
    if there == text:
        return {"changed": False}
    if there is not None and not replace:
        raise DeviceError(
            "other_pin",
            f"{path} pins another key. If the signing key was changed on purpose, enrol with "
            "--replace-key; if not, somebody else enrolled this device",
        )
    made = not path.parent.is_dir()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    if made:
        sync_folder(path.parent.parent)
    os.chmod(path.parent, 0o755)
    return {"changed": True}
