"""The bundle as one file: the same folder gives the same bytes; unpacking trusts nothing."""

import gzip
import os
import shutil
import stat
import tarfile
import zlib
from pathlib import Path

from deployment.jetson.errors import UnsafeArchiveError
from deployment.jetson.on_device.verify import BundleError, safe_relative
from tasks.artifacts.atomic import fsync_folder
from tasks.artifacts.errors import ArtifactWriteError

MAX_MEMBERS = 10_000
MAX_BYTES = 32 << 30
_CHUNK = 1 << 20
_HEADER = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
"""What `write_archive` begins with: deflate, no name, no time; nothing else checks these bytes."""


def write_archive(folder: Path, out: Path, top: str) -> Path:
    """Pack `folder` as `out` (.tar.gz) below the name `top`, atomically.

    Members are sorted, belong to uid 0 and time 0, and are 0644 or, where executable, 0755.

    Raises:
        ArtifactWriteError: the disk refused; nothing of the new archive is left.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as raw:
            with (
                gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                    _add(tar, path, f"{top}/{path.relative_to(folder).as_posix()}")
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, out)
        fsync_folder(out.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ArtifactWriteError(
            f"could not write {out}: {error.strerror or error}; free some space, then run again: "
            "finished stages are reused",
            out,
        ) from error
    return out


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    info = tarfile.TarInfo(name)
    status = path.stat()
    info.size = status.st_size
    info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    with path.open("rb") as file:
        tar.addfile(info, file)


def extract_archive(archive: Path, into: Path, *, max_bytes: int = MAX_BYTES) -> Path:
    """Unpack into the empty folder `into` and return the one folder that was inside.

    Raises:
        UnsafeArchiveError: not a .tar.gz, cut off, too large, or a member that is a link, a device,
            named twice, or would land outside.
    """
    room = min(max_bytes, shutil.disk_usage(into).free)
    try:
        with archive.open("rb") as raw:
            if raw.read(len(_HEADER)) != _HEADER:
                raise UnsafeArchiveError(
                    f"{archive} is not a whole .tar.gz as this program writes it"
                )
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) as packed:
                with tarfile.open(fileobj=packed, mode="r|") as tar:
                    tops = _extract(tar, into, room)
                _read_to_end(packed)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnsafeArchiveError(f"{archive} is not a whole .tar.gz: {error}") from None
    if len(tops) != 1:
        raise UnsafeArchiveError(f"{archive} must hold one folder, it holds {len(tops)}")
    return into / tops.pop()


def _read_to_end(packed: gzip.GzipFile) -> None:
    """Read what follows the last member, so that the checksum at the end of the file is compared.

    Raises:
        tarfile.ReadError: something other than tar's padding.
    """
    while chunk := packed.read(_CHUNK):
        if chunk.strip(b"\0"):
            raise tarfile.ReadError("data after the end of the archive")


def _extract(tar: tarfile.TarFile, into: Path, room: int) -> set[str]:
    tops: set[str] = set()
    for count, member in enumerate(tar, 1):
        try:
            relative = safe_relative(member.name)
        except BundleError:
            raise UnsafeArchiveError(f"unsafe name {member.name!r} in the archive") from None
        if not member.isreg() or len(relative.parts) < 2:
            raise UnsafeArchiveError(f"{member.name!r} is not a plain file inside one folder")
        room -= member.size
        if room < 0 or count > MAX_MEMBERS:
            raise UnsafeArchiveError(
                f"the archive unpacks to too much (at {member.name!r}): over the limit, or over "
                "the free disk"
            )
        tops.add(relative.parts[0])
        _write(tar, member, into / relative)
    return tops


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    if source is None:  # only for members that are no files, which were refused above
        raise UnsafeArchiveError(f"{member.name!r} has no content")
    mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except (FileExistsError, NotADirectoryError):
        raise UnsafeArchiveError(f"{member.name!r} stands twice in the archive") from None
    with os.fdopen(handle, "wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
