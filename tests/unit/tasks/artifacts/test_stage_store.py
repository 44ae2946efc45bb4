"""A stage folder knows whether it is whole."""

import json

import pytest

from tasks.artifacts import ArtifactRecord, hash_bytes
from tasks.artifacts.store import CONTROL, StageFolder, list_files

KEY = "0123456789abcdef" * 4


@pytest.fixture
def folder(tmp_path):
    """A finished output: two files, a checkpoint and a progress file."""
    folder = StageFolder(tmp_path, "rl", KEY)
    for name, text in {
        "a.json": "one",
        "policy/w.bin": "weights",
        "checkpoints/1.bin": "x",
        "progress.json": "{}",
    }.items():
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    record = ArtifactRecord(kind="model", uri=folder.path.as_posix(), sha256="s", meta={"n": 1})
    folder.finish(record, wall_s=2.5, peak_tree_bytes=None, mlflow_run_id="m")
    return folder


def test_a_finished_output_verifies_with_everything_it_was_told(folder):
    finished = folder.verify().finished
    assert finished.record.meta == {"n": 1}
    assert (finished.wall_s, finished.peak_tree_bytes, finished.mlflow_run_id) == (2.5, None, "m")
    assert finished.files == {
        "a.json": {"sha256": hash_bytes(b"one"), "size": 3},
        "policy/w.bin": {"sha256": hash_bytes(b"weights"), "size": 7},
    }


def test_no_mark_is_not_finished(tmp_path):
    verdict = StageFolder(tmp_path, "rl", KEY).verify()
    assert (verdict.finished, verdict.corrupt, verdict.reason) == (None, (), "not finished")


@pytest.mark.parametrize("damage", ["same size", "longer", "gone", "is a folder"])
def test_one_damaged_file_is_named(folder, damage):
    path = folder.path / "policy/w.bin"
    path.unlink()
    if damage == "same size":
        path.write_text("weightz")
    elif damage == "longer":
        path.write_text("weights!")
    elif damage == "is a folder":
        path.mkdir()
    assert folder.verify().corrupt == ("policy/w.bin",)
    assert folder.verify().reason == "artefact corrupted: policy/w.bin"


def test_checkpoints_and_progress_are_free_to_change(folder):
    (folder.path / "checkpoints/1.bin").write_text("other")
    (folder.path / "progress.json").unlink()
    assert folder.verify().finished is not None


@pytest.mark.parametrize("how", ["cut off", "edited", "other key", "list", "empty"])
def test_a_damaged_mark_is_corrupt_never_trusted(folder, how):
    mark = folder.control / "finished.json"
    body = json.loads(mark.read_text())
    texts = {
        "cut off": mark.read_text()[:40],
        "edited": json.dumps({**body, "files": {}}),
        "other key": json.dumps({**body, "key": "f" * 64}),
        "list": "[]",
        "empty": "",
    }
    mark.write_text(texts[how])
    assert folder.verify().corrupt == (f"{CONTROL}/finished.json",)


def test_reopen_moves_the_bad_file_aside_and_keeps_the_rest(folder):
    (folder.path / "policy/w.bin").write_text("weightz")
    folder.reopen(folder.verify().corrupt)
    assert folder.verify().reason == "not finished"
    assert not (folder.path / "policy/w.bin").exists()
    aside = folder.path.with_name(folder.path.name + ".corrupt") / "policy/w.bin"
    assert aside.read_text() == "weightz"
    assert (folder.path / "checkpoints/1.bin").read_text() == "x"


def test_discard_takes_everything_and_may_be_repeated(folder):
    folder.discard()
    folder.discard()
    assert list(folder.path.parent.iterdir()) == []


def test_an_empty_folder_lists_nothing(tmp_path):
    assert list_files(tmp_path) == {}
