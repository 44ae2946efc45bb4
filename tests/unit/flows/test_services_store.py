"""Artefact addresses that name no folder of this machine."""

from pathlib import Path

import pytest

from flows.services_databases import databases
from flows.services_store import absolute_addresses, make_movable, movable

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
    make_movable(of, addresses)
    assert absolute_addresses(of, tmp_path) == []
    fresh = MlflowClient(tracking_uri=of.sync_url)
    assert fresh.get_run(run_id).info.artifact_uri == f"mlflow-artifacts:/{run_id}/artifacts"
    assert fresh.get_experiment(theirs).artifact_location == f"{FILE}/elsewhere/files"
