"""What the device remembers between calls: the last good release, and the one being tried.

`trying` is written before anything is switched and taken out only when the release has proved
itself or the good one is back. A call that finds it set knows that one before it was killed.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator

from deployment.fleet.on_device.places import SHA12, DeviceError, Places, write_whole

FORMAT = 1
_POLL_S = 0.2


def read_journal(places: Places) -> dict:
    """`{"good": sha12 | None, "trying": sha12 | None}`; an agent installed by hand is taken on.

    Raises:
        DeviceError: the file is not what this code writes.
    """
    try:
        raw = places.journal.read_bytes()
    except FileNotFoundError:
        return {"good": places.linked("current"), "trying": None}
    try:
        value = json.loads(raw)
        known = value["format"] == FORMAT
        good, trying = value["good"], value["trying"]
        known = known and all(s is None or SHA12.match(s) for s in (good, trying))
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise DeviceError(
            "journal",
            f"{places.journal} is not of format {FORMAT}; look at the device, then take the file "
            "away: the release that `current` names is then taken as the good one",
        )
    return {"good": good, "trying": trying}


def write_journal(places: Places, good: "str | None", trying: "str | None") -> None:
    """Remember both, safely against a power cut."""
    value = {"format": FORMAT, "good": good, "trying": trying, "pid": os.getpid()}
    write_whole(places.journal, json.dumps(value, sort_keys=True).encode() + b"\n")


@contextlib.contextmanager
def locked(places: Places, wait_s: float) -> Iterator[None]:
    """Hold the agent's lock, the one `install.sh` takes too; a killed holder frees it.

    Raises:
        DeviceError: another holds it for longer than `wait_s`.
    """
    places.app.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + wait_s
    handle = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _lock(handle):
            if time.monotonic() >= end_s:
                raise DeviceError(
                    "busy", f"another installation of {places.agent} is running on this device"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
