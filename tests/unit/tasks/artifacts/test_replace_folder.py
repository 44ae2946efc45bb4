"""A folder is replaced whole, or not at all."""

import pytest

from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.folder import replace_folder


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_new_folder_takes_the_old_ones_place(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("1")
    with replace_folder(target) as fresh:
        (fresh / "new").write_text("2")
        assert names(target) == ["old"]  # nothing is seen before the end
    assert names(target) == ["new"]
    assert names(tmp_path) == ["model"]


def test_an_error_inside_leaves_the_old_folder_and_no_rest(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("1")
    with pytest.raises(KeyError), replace_folder(target) as fresh:
        (fresh / "half").write_text("2")
        raise KeyError("stop")
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]


def test_a_full_disk_is_named_and_loses_nothing(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("1")
    with pytest.raises(ArtifactWriteError, match="free some space"), replace_folder(target):
        raise OSError(28, "No space left on device")
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]
