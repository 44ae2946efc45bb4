"""Who runs what: the record of a device and the history of all."""

import json

import pytest

from deployment.fleet.books import DeviceBooks
from deployment.fleet.device import DeviceResult
from tasks.artifacts.errors import ArtifactCorruptError

A, B = "a" * 64, "b" * 64


def _result(**other):
    values = {"device": "one", "action": "deploy", "outcome": "deployed", "release": A}
    return DeviceResult(**{**values, "serving": A, **other})


def test_a_deployment_and_a_failure(tmp_path):
    books = DeviceBooks(tmp_path)
    assert books.record("one") is None and books.history().rows == ()
    books.enter(_result(), "agent", "runs/a/bundle")
    record = books.record("one")
    assert (record["release"], record["bundle"], record["agent"]) == (A, "runs/a/bundle", "agent")
    failed = _result(outcome="failed", release=B, serving=A, previous=A, reason="no", error="E")
    books.enter(failed, "agent", "runs/b/bundle")
    assert books.record("one") == record  # what serves did not change, nor did its time
    rows = books.history().rows
    assert [(r["release"], r["ok"], r["outcome"]) for r in rows] == [
        (A, True, "deployed"),
        (B, False, "failed"),
    ]
    assert rows[1]["reason"] == "no" and rows[1]["previous"] == A
    assert set(rows[0]) >= {"time", "device", "action", "release", "previous", "ok", "reason"}


def test_unknown_state_changes_nothing(tmp_path):
    books = DeviceBooks(tmp_path)
    books.enter(_result(), "agent", "bundle")
    books.enter(_result(outcome="failed", release=B, serving=None), "agent", "other")
    assert books.record("one")["release"] == A


def test_a_rollback_finds_the_bundle_of_its_release(tmp_path):
    books = DeviceBooks(tmp_path)
    books.enter(_result(), "agent", "runs/a")
    books.enter(_result(release=B, serving=B, previous=A), "agent", "runs/b")
    books.enter(_result(action="rollback", previous=B), "agent", books.bundle_of(A))
    assert (books.record("one")["release"], books.record("one")["bundle"]) == (A, "runs/a")
    assert books.bundle_of("c" * 64) is None


def test_torn_history_and_broken_record(tmp_path):
    books = DeviceBooks(tmp_path)
    books.enter(_result(), "agent", "runs/a")
    with books.history_path.open("a") as file:
        file.write('{"device": "one", "rel')
    books.enter(_result(release=B, serving=B), "agent", "runs/b")
    lines = books.history()
    assert ([row["release"] for row in lines.rows], lines.unreadable) == ([A, B], (2,))
    for text in ("{", "[]", ""):
        (tmp_path / "devices/one.json").write_text(text)
        with pytest.raises(ArtifactCorruptError, match=r"one\.json cannot be read"):
            books.record("one")


def test_hostile_reasons_are_data(tmp_path):
    books = DeviceBooks(tmp_path)
    books.enter(_result(outcome="failed", reason='"\n\x1b[31m{"ok": true}'), "agent", None)
    (row,) = books.history().rows
    assert row["reason"] == '"\n\x1b[31m{"ok": true}'
    assert len(books.history_path.read_text().splitlines()) == 1
    assert json.loads(books.history_path.read_text())["ok"] is False
