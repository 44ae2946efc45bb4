"""Takes an archive in pieces, and turns it into a release beside the running one.

What has arrived stays as `incoming/HASH.part`, and the next call says how much of it there is and
what it hashes to, so that a cut connection costs only what was under way. Nothing of the bundle is
run, unpacked or believed before its hash, and nothing is run before its signature.
"""

import errno
import gzip
import hashlib
import os
import shutil
import signal
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from deployment.fleet.on_device.places import DeviceError, Places, release_hash, sync_folder
from deployment.jetson.on_device.verify import SHA256, BundleError, safe_relative, verify_bundle

MAX_MEMBERS = 10_000
IDLE_S = 20
_CHUNK = 1 << 20
_SPARE_BYTES = 8 << 20
"""Left free beside what the release takes: journal, logs, links."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk with no room says, quota and file limits included."""


def full_disk(
    folder: Path, what: str, error: "OSError | None" = None, need: int = 0
) -> DeviceError:
    """The error of a disk with no room."""
    while not folder.exists():
        folder = folder.parent
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    why = f" ({error.strerror})" if error else ""
    wanted = f", {need:,} bytes are needed" if need else ""
    return DeviceError(
        "disk_full",
        f"the disk is full{why}: {what}; {folder} has {free:,} bytes free{wanted}. Free some space "
        "on the device, then deploy again: what has arrived is kept",
    )


def part_path(places: Places, sha256: str) -> Path:
    """Where the archive with this hash collects."""
    if not SHA256.match(sha256):
        raise DeviceError("request", "the archive's hash is malformed")
    return places.incoming / f"{sha256}.part"


def arrived(places: Places, sha256: str, size: int, unpacked: int) -> dict:
    """How much of an archive is here, and the hash of that; archives of others are cleared away.

    Raises:
        DeviceError: the disk has no room for the rest and for the release.
    """
    path = part_path(places, sha256)
    places.incoming.mkdir(parents=True, exist_ok=True)
    for old in places.incoming.iterdir():
        if old != path:
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    have = path.stat().st_size if path.exists() else 0
    if have > size:
        path.unlink()
        have = 0
    need = size - have + unpacked + _SPARE_BYTES
    info = os.statvfs(places.incoming)
    if info.f_bavail * info.f_frsize < need:
        raise full_disk(places.incoming, "the bundle does not fit", need=need)
    return {"have": have, "sha256": _sha256(path) if have else hashlib.sha256().hexdigest()}


def append(places: Places, sha256: str, offset: int, size: int, stream: BinaryIO) -> dict:
    """Add what `stream` brings to an archive, from `offset` on; 0 begins anew.

    Raises:
        DeviceError: the disk refused, or the archive on the device is not at `offset`.
    """
    path = part_path(places, sha256)
    places.incoming.mkdir(parents=True, exist_ok=True)
    if offset and (not path.exists() or path.stat().st_size < offset):
        raise DeviceError("request", f"the archive on the device does not reach byte {offset}")
    try:
        with path.open("r+b" if offset else "wb") as file:
            file.truncate(offset)
            file.seek(offset)
            left = size - offset
            for chunk in _as_it_comes(stream, left):
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in FULL:
            raise full_disk(path.parent, "the archive could not be taken", error) from None
        raise
    return {"have": size - left}


def _as_it_comes(stream: BinaryIO, left: int) -> Iterator[bytes]:
    """Up to `left` bytes; a connection that died without a word is given up after `IDLE_S`."""

    def give_up(*_: object) -> None:
        raise DeviceError("transfer", f"nothing arrived for {IDLE_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        while left > 0:
            signal.alarm(IDLE_S)
            chunk = stream.read1(min(_CHUNK, left))
            signal.alarm(0)
            if not chunk:
                return
            left -= len(chunk)
            yield chunk
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def place(
    places: Places, sha256: str, manifest_sha256: str, max_bytes: int, say: Callable[[str], None]
) -> dict:
    """Check the archive, unpack it, verify the bundle, and put it into `releases/`.

    Raises:
        DeviceError: another hash, an unsafe archive, a bundle that the pinned key did not sign, a
            full disk.
    """
    release = places.release(manifest_sha256[:12])
    say("checking the archive")
    path = part_path(places, sha256)
    if not path.exists() or _sha256(path) != sha256:
        path.unlink(missing_ok=True)
        raise DeviceError("transfer", "the archive that arrived has another hash; it was dropped")
    into = places.incoming / manifest_sha256[:12]
    shutil.rmtree(into, ignore_errors=True)
    try:
        into.mkdir()
        say("unpacking")
        folder = unpack(path, into, max_bytes)
        say("checking every file and the signature against the pinned key")
        check_bundle(folder, places.pin)
        if release_hash(folder) != manifest_sha256:
            raise DeviceError("refused", "the archive holds another release than was announced")
        for entry in [folder, *folder.rglob("*")]:
            runs = entry.is_dir() or entry.stat().st_mode & stat.S_IXUSR
            entry.chmod(0o755 if runs else 0o644)
        places.releases.mkdir(parents=True, exist_ok=True)
        if release.exists():  # damaged, or the caller would not have sent it
            shutil.rmtree(release)
        os.replace(folder, release)
        sync_folder(places.releases)
        path.unlink()
    except OSError as error:
        if error.errno in FULL:
            raise full_disk(into.parent, "the bundle could not be unpacked", error) from None
        raise
    finally:
        shutil.rmtree(into, ignore_errors=True)
    return {"release": manifest_sha256}


def check_bundle(folder: Path, pin: Path) -> dict:
    """The manifest of a bundle that the pinned key signed.

    Raises:
        DeviceError: it is refused.
    """
    if not pin.is_file():
        raise DeviceError("not_enrolled", f"no pinned key at {pin}; enrol the device first")
    try:
        return verify_bundle(folder, pin)
    except BundleError as error:
        raise DeviceError("refused", str(error)) from None


def unpack(archive: Path, into: Path, max_bytes: int) -> Path:
    """Unpack a .tar.gz of plain files below one folder, and return that folder.

    Raises:
        DeviceError: a link, a device, a name twice, a path outside, too much, or not whole.
    """
    tops, left = set(), max_bytes
    try:
        with tarfile.open(archive, mode="r:gz") as tar:
            for count, member in enumerate(tar, 1):
                relative = safe_relative(member.name)
                left -= member.size
                if not member.isreg() or len(relative.parts) < 2 or left < 0 or count > MAX_MEMBERS:
                    raise DeviceError("refused", f"{member.name!r}: no plain file, or too much")
                tops.add(relative.parts[0])
                _write_member(tar, member, into / relative)
    except BundleError as error:
        raise DeviceError("refused", str(error)) from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DeviceError("refused", f"the archive is not a whole .tar.gz: {error}") from None
    if len(tops) != 1:
        raise DeviceError("refused", f"the archive must hold one folder, it holds {len(tops)}")
    return into / tops.pop()


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    if source is None:
        raise DeviceError("refused", f"{member.name!r} has no content")
    mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except (FileExistsError, NotADirectoryError):
        raise DeviceError("refused", f"{member.name!r} stands twice in the archive") from None
    with os.fdopen(handle, "wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
        file.flush()
        os.fsync(file.fileno())
