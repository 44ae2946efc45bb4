"""Going on from an earlier release: the same weights by hash, under the name RL starts from."""

import os

import pytest

from tasks.artifacts import ArtifactRecord
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.artifacts.progress import Reporter
from tasks.models.load import hash_model, load_tokenizer
from tasks.sft.stage import run
from tasks.sft.start import adopt, link_or_copy


@pytest.fixture
def release(tiny_config, tiny_data, tmp_path):
    """A policy of an earlier run, as RL leaves it."""
    out = tmp_path / "earlier"
    made = run(tiny_config(sft={"steps": 1}), {"data": tiny_data.record}, out, Reporter(out))
    os.rename(out / "snapshot", out / "policy")
    return made


def test_the_policy_becomes_the_snapshot_with_the_same_hash(release, tmp_path, tiny_tokenizer):
    out = tmp_path / "night"
    out.mkdir()
    record = adopt(release, out, Reporter(out))
    assert record.sha256 == release.sha256 == hash_model(out / "snapshot")
    assert (record.kind, record.uri) == ("model", out.as_posix())
    assert record.meta["adopted_from"] == release.uri
    assert load_tokenizer(out / "snapshot").get_vocab() == tiny_tokenizer.get_vocab()
    weights = next((out / "snapshot").glob("*.safetensors"))
    assert os.path.samefile(weights, release.path / "policy" / weights.name)  # no second copy
    assert adopt(release, out, Reporter(out)) == record  # a night killed here does it again


def test_a_snapshot_is_taken_where_there_is_no_policy(release, tmp_path):
    os.rename(release.path / "policy", release.path / "snapshot")
    out = tmp_path / "night"
    out.mkdir()
    assert adopt(release, out, Reporter(out)).sha256 == release.sha256


def test_other_weights_than_those_of_the_record_are_refused(release, tmp_path):
    forged = release.model_copy(update={"sha256": "f" * 64})
    out = tmp_path / "night"
    out.mkdir()
    with pytest.raises(ArtifactCorruptError, match="its record says ffffffffffff"):
        adopt(forged, out, Reporter(out))


def test_a_release_that_is_gone_is_named_with_what_to_do(tmp_path):
    gone = ArtifactRecord(kind="model", uri=str(tmp_path / "gone"), sha256="0" * 64)
    with pytest.raises(ArtifactCorruptError, match=r"nightly\.start_from=base"):
        adopt(gone, tmp_path, Reporter(tmp_path))


def test_where_the_disk_cannot_link_it_copies(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("weights")

    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "weights"
    assert not os.path.samefile(tmp_path / "a", tmp_path / "b")
