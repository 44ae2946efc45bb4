"""A bundle is judged here before any device hears of it."""

import shutil

import pytest

from deployment.fleet.cargo import loaded
from deployment.jetson.errors import UnsafeArchiveError
from deployment.jetson.on_device.verify import BundleError
from tasks.artifacts import hash_file


def test_folder_and_archive_are_the_same_cargo(package, releases, tmp_path):
    with loaded(package.bundle, package.pin) as folder, loaded(package.archive, package.pin) as arc:
        assert (folder.release, folder.sha12) == (package.record.sha256, arc.sha12)
        assert folder.archive == arc.archive == package.archive
        assert folder.unpacked_bytes == arc.unpacked_bytes > package.archive.stat().st_size
        assert folder.golden == arc.golden
    with loaded(releases.two, releases.pin) as made, loaded(releases.two, releases.pin) as again:
        assert made.archive != again.archive
        assert made.archive_sha256 == again.archive_sha256  # so a cut transfer can go on
        copy = shutil.copy(made.archive, tmp_path)
    assert not made.archive.exists()
    with loaded(tmp_path / copy, releases.pin) as kept:
        assert kept.release == hash_file(releases.two / "manifest.json")


def test_refused_here_already(releases, tmp_path):
    for bundle, pin, match in (
        (releases.foreign, releases.pin, "not a good signature|not in"),
        (tmp_path / "none", releases.pin, "does not exist|manifest"),
    ):
        with pytest.raises((BundleError, FileNotFoundError), match=match), loaded(bundle, pin):
            pass
    changed = shutil.copytree(releases.two, tmp_path / "changed")
    (changed / "NOTICE").write_text("another")
    with pytest.raises(BundleError, match="NOTICE"), loaded(changed, releases.pin):
        pass
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(b"\x1f\x8b")
    with pytest.raises(UnsafeArchiveError), loaded(broken, releases.pin):
        pass
