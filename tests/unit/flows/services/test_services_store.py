"""Artefact addresses that name no folder of this machine."""

import sqlite3
from pathlib import Path

import pytest

from flows.services.backup import backups_dir
from flows.services.databases import check_databases, databases, known_revisions
from flows.services.store import (
    absolute_addresses,
    make_movable,
    movable,
    prepare_databases,
    release_artifacts,
)

FILE = "file:" + "//"
OURS = Path("/data/runs/mlartifacts")


@pytest.mark.parametrize(
    ("uri", "new"),
    [
        (f"{FILE}/data/runs/mlartifacts", "mlflow-artifacts:/"),
        (f"{FILE}/data/runs/mlartifacts/abc/artifacts", "mlflow-artifacts:/abc/artifacts"),
        (f"{FILE}/data/runs/mlartifacts/a%20b/artifacts", "mlflow-artifacts:/a b/artifacts"),
        ("mlflow-artifacts:/abc/artifacts", None),
        ("s3://bucket/mlartifacts/abc", None),
        (f"{FILE}/elsewhere/mlartifacts/abc/artifacts", None),
        (f"{FILE}/data/runs/mlartifacts-old/abc", None),
    ],
)
def test_absolute_artifact_uris_become_relative_to_the_server(uri, new):
    assert movable(uri, OURS) == new


def test_a_folder_that_was_moved_here_is_recognised_by_what_it_holds(tmp_path):
    (tmp_path / "mlartifacts" / "abc" / "artifacts").mkdir(parents=True)
    ours = tmp_path / "mlartifacts"
    assert movable(f"{FILE}/old/mlartifacts/abc/artifacts", ours) == (
        "mlflow-artifacts:/abc/artifacts"
    )
    assert movable(f"{FILE}/old/mlartifacts/other/artifacts", ours) is None


def test_a_store_filled_without_a_server_is_rewritten_once(tmp_path):
    from mlflow import MlflowClient

    from tasks.tracking.tracker import local_artifacts

    of = databases(tmp_path)[1]
    client = MlflowClient(tracking_uri=of.sync_url)
    ours = client.create_experiment("ours", artifact_location=local_artifacts(tmp_path))
    theirs = client.create_experiment("theirs", artifact_location=f"{FILE}/elsewhere/files")
    run_id = client.create_run(ours).info.run_id
    addresses = absolute_addresses(of, tmp_path)
    assert {(a.table, a.new) for a in addresses} == {
        ("experiments", "mlflow-artifacts:/"),
        ("runs", f"mlflow-artifacts:/{run_id}/artifacts"),
    }
    told = []
    for _ in range(2):
        release_artifacts(tmp_path, lambda *what: told.append(what))
    assert told[1:] == [("mlflow", "2 artefact addresses no longer name this folder")]
    assert len(list(backups_dir(tmp_path).iterdir())) == 1
    make_movable(of, addresses)  # as after a crash between the two: changes nothing
    assert absolute_addresses(of, tmp_path) == []
    fresh = MlflowClient(tracking_uri=of.sync_url)
    assert fresh.get_run(run_id).info.artifact_uri == f"mlflow-artifacts:/{run_id}/artifacts"
    assert fresh.get_experiment(theirs).artifact_location == f"{FILE}/elsewhere/files"


def older(of):
    """Take the schema of MLflow's database one revision back, as an older version left it."""
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config
    from sqlalchemy import text

    from flows.services.databases import connect

    config = _get_alembic_config(of.sync_url)
    engine = connect(of)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.stamp(config, "head")
        command.downgrade(config, "-1")
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    engine.dispose()
    return found


def test_an_older_database_is_backed_up_then_migrated(tmp_path):
    from mlflow import MlflowClient

    of = databases(tmp_path)[1]
    MlflowClient(tracking_uri=of.sync_url).create_experiment("kept")
    try:
        before = older(of)
    except NotImplementedError:
        pytest.skip("the newest migration of this MLflow has no way back")
    assert before != known_revisions(of)[1]
    assert check_databases(tmp_path)["mlflow"] == "older"
    told = []
    prepare_databases(tmp_path, lambda *what: told.append(what))
    assert check_databases(tmp_path)["mlflow"] == "current"
    (backup,) = backups_dir(tmp_path).iterdir()
    with sqlite3.connect(backup / "mlflow.db") as copy:
        assert copy.execute("SELECT version_num FROM alembic_version").fetchone() == (before,)
    assert "before migrating mlflow" in told[0][1]
    assert MlflowClient(tracking_uri=of.sync_url).get_experiment_by_name("kept") is not None
    prepare_databases(tmp_path, lambda *what: told.append(what))
    assert len(told) == 1
