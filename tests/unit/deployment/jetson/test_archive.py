import gzip
import io
import os
import tarfile

import pytest

from deployment.jetson.archive import extract_archive, write_archive
from deployment.jetson.errors import UnsafeArchiveError
from tasks.artifacts import hash_tree
from tasks.artifacts.errors import ArtifactWriteError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "bundle"
    (folder / "models").mkdir(parents=True)
    (folder / "b.txt").write_text("é")
    (folder / "a.sh").write_text("#!/bin/sh\n")
    (folder / "a.sh").chmod(0o755)
    (folder / "models" / "m.gguf").write_bytes(bytes(range(256)) * 9000)
    return folder


def _tar(path, *members):
    """A .tar.gz of (TarInfo, bytes)."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.write(plain.getvalue())
    return path


def _file(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_same_folder_same_bytes(folder, tmp_path):
    first = write_archive(folder, tmp_path / "1.tar.gz", "top").read_bytes()
    os.utime(folder / "b.txt", (1, 1))
    (folder / "b.txt").chmod(0o600)
    second = write_archive(folder, tmp_path / "2.tar.gz", "top").read_bytes()
    assert first == second


def test_members_are_sorted_owned_by_root_and_timeless(folder, tmp_path):
    with tarfile.open(write_archive(folder, tmp_path / "x.tar.gz", "top")) as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == ["top/a.sh", "top/b.txt", "top/models/m.gguf"]
    assert {(m.mtime, m.uid, m.gid, m.uname) for m in members} == {(0, 0, 0, "")}
    assert [oct(m.mode) for m in members] == ["0o755", "0o644", "0o644"]


def test_round_trip(folder, tmp_path):
    archive = write_archive(folder, tmp_path / "x.tar.gz", "top-1")
    (tmp_path / "out").mkdir()
    out = extract_archive(archive, tmp_path / "out")
    assert out.name == "top-1"
    assert hash_tree(out) == hash_tree(folder)
    assert os.access(out / "a.sh", os.X_OK)
    assert not os.access(out / "b.txt", os.X_OK)


@pytest.mark.parametrize(
    "info",
    [
        _file("../evil"),
        _file("top/../../evil"),
        _file("/etc/evil"),
        _file("top"),
        _file("top/a\\b"),
        _file("top/link", tarfile.SYMTYPE, "/etc/passwd"),
        _file("top/link", tarfile.LNKTYPE, "top/b"),
        _file("top/pipe", tarfile.FIFOTYPE),
        _file("top/dev", tarfile.CHRTYPE),
        _file("top/dir", tarfile.DIRTYPE),
    ],
    ids=lambda i: f"{i.name}-{i.type!r}",
)
def test_unsafe_members_are_refused(tmp_path, info):
    archive = _tar(tmp_path / "x.tar.gz", (_file("top/ok"), b"1"), (info, b""))
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeArchiveError):
        extract_archive(archive, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_a_name_twice_is_refused(tmp_path):
    archive = _tar(tmp_path / "x.tar.gz", (_file("top/a"), b"1"), (_file("top/a"), b"2"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeArchiveError, match="twice"):
        extract_archive(archive, tmp_path / "out")
    assert (tmp_path / "out" / "top" / "a").read_bytes() == b"1"


def test_a_file_used_as_a_folder_is_refused(tmp_path):
    archive = _tar(tmp_path / "x.tar.gz", (_file("top/a"), b"1"), (_file("top/a/b"), b"2"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeArchiveError, match="twice"):
        extract_archive(archive, tmp_path / "out")


def test_two_folders_or_none_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    two = _tar(tmp_path / "2.tar.gz", (_file("a/x"), b"1"), (_file("b/x"), b"2"))
    with pytest.raises(UnsafeArchiveError, match="it holds 2"):
        extract_archive(two, tmp_path / "out")
    with pytest.raises(UnsafeArchiveError, match="it holds 0"):
        extract_archive(_tar(tmp_path / "0.tar.gz"), tmp_path / "out")


def test_size_is_bounded_before_anything_is_written(tmp_path):
    archive = _tar(tmp_path / "x.tar.gz", (_file("top/a"), b"0" * 11))
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeArchiveError, match="too much"):
        extract_archive(archive, tmp_path / "out", max_bytes=10)
    assert list((tmp_path / "out").rglob("*")) == []
    assert extract_archive(archive, tmp_path / "out", max_bytes=11).is_dir()


@pytest.mark.parametrize("cut", [0, 1, 20, 500, -1])
def test_cut_archive_is_refused(folder, tmp_path, cut):
    archive = write_archive(folder, tmp_path / "x.tar.gz", "top")
    archive.write_bytes(archive.read_bytes()[:cut])
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeArchiveError, match="not a whole"):
        extract_archive(archive, tmp_path / "out")


def test_changed_byte_in_the_archive_is_refused(folder, tmp_path):
    """Header and checksum included: neither is looked at by the tar reader alone."""
    good = write_archive(folder, tmp_path / "x.tar.gz", "top").read_bytes()
    for place in [*range(10), 300, len(good) // 2, *range(len(good) - 8, len(good))]:
        bad = bytearray(good)
        bad[place] ^= 1
        (tmp_path / "bad.tar.gz").write_bytes(bad)
        (tmp_path / str(place)).mkdir()
        with pytest.raises(UnsafeArchiveError):
            extract_archive(tmp_path / "bad.tar.gz", tmp_path / str(place))


def test_data_after_the_archive_is_refused(folder, tmp_path):
    archive = write_archive(folder, tmp_path / "x.tar.gz", "top")
    archive.write_bytes(archive.read_bytes() + gzip.compress(b"more"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeArchiveError):
        extract_archive(archive, tmp_path / "out")


def test_disk_that_refuses_leaves_no_archive(folder):
    """A folder that is not there refuses the file, as a full disk does."""
    with pytest.raises(ArtifactWriteError, match="free some space"):
        write_archive(folder, folder.parent / "missing" / "x.tar.gz", "top")
    assert not list(folder.parent.glob("*.tar.gz*"))
