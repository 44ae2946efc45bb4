"""MLflow's registry follows the ledger, over a real SQLite store and a real MLflow server."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tasks.artifacts import ArtifactRecord
from tasks.tracking.operations import create_run, follow_ledger
from tasks.tracking.promotion_ledger import PromotionLedger, Release
from tasks.tracking.registry import ForeignRegistryError, aliases
from tasks.tracking.registry import follow_ledger as follow
from tasks.tracking.tracker import open_tracker, upload_pending


def release(number, run_id=None):
    """The release of bundle `number`."""
    meta = {"default": "Q8_0", "quantisations": ["IQ2_M", "Q8_0"]}
    records = {
        "rl": ArtifactRecord(kind="model", uri="x", sha256="a" * 64),
        "package": ArtifactRecord(kind="bundle", uri="y", sha256=f"{number:064x}", meta=meta),
    }
    return Release(
        model="calc-1",
        profile="calc.1",
        run_id=run_id or f"run-{number}",
        bundle_sha256=f"{number:064x}",
        bundle="y/bundle",
        records=records,
    )


@pytest.fixture
def ledger(runs):
    """An empty ledger in the runs folder."""
    return PromotionLedger(runs, "calc-1")


@pytest.fixture
def tracker(runs):
    """The tracker of run r1."""
    return open_tracker(runs, runs / "r1", "exp", f"sqlite:///{runs / 'mlflow.db'}")


@pytest.fixture
def client(tracker):
    """A client of the same store."""
    return tracker.speaker.client


def sha(number):
    return f"{number:064x}"


def test_versions_tags_and_aliases_follow_every_entry(ledger, client, tracker):
    assert follow(client, ledger).changes == ()
    assert aliases(client, "calc-1") == {}
    tracker.say(create_run("run", "r1", None, {"run_id": "run-1"}))
    ledger.append("promote", release(1), reason="first", actor="ann@x")
    assert follow(client, ledger).changes == (
        "model calc-1 registered",
        "version 1 made",
        "champion moved to version 1",
    )
    version = client.get_model_version_by_alias("calc-1", "champion")
    assert version.run_id == tracker.run_id("run")
    assert version.source == client.get_run(version.run_id).info.artifact_uri
    tags = version.tags
    assert tags["bundle.sha256"] == sha(1)
    assert tags["policy.sha256"] == tags["rl.sha256"] == "a" * 64
    assert (tags["quantisation"], tags["quantisations"]) == ("Q8_0", "IQ2_M, Q8_0")
    assert (tags["run_id"], tags["ledger.actor"]) == ("run-1", "ann@x")
    assert tags["ledger.hash"] == ledger.entries()[0].hash

    ledger.append("promote", release(2), reason="better")
    assert follow(client, ledger).changes == (
        "version 2 made",
        "previous moved to version 1",
        "champion moved to version 2",
    )
    ledger.append("candidate", release(3), reason="worse")
    assert follow(client, ledger).changes == ("version 3 made",)
    assert client.get_model_version("calc-1", "3").tags["ledger.reason"] == "worse"
    assert follow(client, ledger).changes == ()
    assert aliases(client, "calc-1") == {"champion": sha(2), "previous": sha(1)}

    ledger.append("rollback", release(1), reason="wrong units")
    assert follow(client, ledger).changes == (
        "champion moved to version 1",
        "previous taken away",
    )
    assert aliases(client, "calc-1") == {"champion": sha(1)}


def test_aliases_moved_by_hand_are_moved_back(ledger, client):
    for number in (1, 2, 3):
        ledger.append("promote", release(number), reason="r")
    follow(client, ledger)
    client.set_registered_model_alias("calc-1", "champion", "1")
    client.delete_registered_model_alias("calc-1", "previous")
    client.set_registered_model_alias("calc-1", "mine", "1")
    assert follow(client, ledger).changes == (
        "previous moved to version 2",
        "champion moved to version 3",
    )
    assert int(client.get_model_version_by_alias("calc-1", "mine").version) == 1  # not ours
    client.delete_model_version("calc-1", "3")
    followed = follow(client, ledger)
    assert followed.champion is not None
    assert aliases(client, "calc-1") == {"champion": sha(3), "previous": sha(2)}


def test_a_model_of_another_ledger_is_left_alone(runs, tmp_path, ledger, client):
    ledger.append("promote", release(1), reason="ours")
    follow(client, ledger)
    other = PromotionLedger(tmp_path / "elsewhere", "calc-1")
    other.append("promote", release(7), reason="theirs")
    with pytest.raises(ForeignRegistryError, match=r"follows another promotion ledger"):
        follow(client, other)
    assert aliases(client, "calc-1") == {"champion": sha(1)}
    client.delete_registered_model_tag("calc-1", "ledger.first")
    follow(client, other)
    assert aliases(client, "calc-1") == {"champion": sha(7)}


def test_a_store_that_is_locked_leaves_the_ledger_right_and_the_aliases_pending(
    runs, ledger, tracker
):
    import sqlite3

    ledger.append("promote", release(1), reason="first")
    lock = sqlite3.connect(runs / "mlflow.db")
    lock.execute("BEGIN IMMEDIATE")
    tracker.say(create_run("run", "r1", None, {"run_id": "run-1"}), follow_ledger(ledger.path))
    assert tracker.pending == 2
    assert ledger.champion().run_id == "run-1"
    lock.rollback()
    lock.close()
    ledger.append("promote", release(2), reason="meanwhile")
    assert upload_pending(runs / "r1") == 2
    assert aliases(tracker.speaker.client, "calc-1") == {"champion": sha(2), "previous": sha(1)}
    version = tracker.speaker.client.get_model_version("calc-1", "1")
    assert version.run_id  # the run went up first


def test_a_broken_ledger_moves_no_alias_and_stops_no_run(ledger, tracker, client, caplog):
    ledger.append("promote", release(1), reason="first")
    tracker.say(follow_ledger(ledger.path))
    ledger.append("promote", release(2), reason="second")
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b"second", b"Second"))
    tracker.say(follow_ledger(ledger.path))
    assert tracker.pending == 0
    assert "line 2" in caplog.text
    assert aliases(client, "calc-1") == {"champion": sha(1)}


@pytest.fixture
def server(tmp_path):
    """The address of an MLflow server of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}"),
        *("--artifacts-destination", str(tmp_path / "artifacts")),
    ]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, **quiet},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, "the MLflow server ended"
                time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(timeout=30)


@pytest.mark.slow
def test_the_same_through_an_mlflow_server(runs, server, ledger):
    tracker = open_tracker(runs, runs / "r1", "exp", server)
    tracker.say(create_run("run", "r1", None, {"run_id": "run-1"}))
    ledger.append("promote", release(1), reason="first")
    ledger.append("promote", release(2), reason="better")
    tracker.say(follow_ledger(ledger.path))
    assert tracker.pending == 0
    client = tracker.speaker.client
    assert aliases(client, "calc-1") == {"champion": sha(2), "previous": sha(1)}
    first = client.get_model_version_by_alias("calc-1", "previous")
    assert first.run_id == tracker.run_id("run")
    ledger.append("rollback", release(1), reason="back")
    tracker.say(follow_ledger(ledger.path))
    assert aliases(client, "calc-1") == {"champion": sha(1)}
