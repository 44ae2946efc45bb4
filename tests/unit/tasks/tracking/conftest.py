"""A migrated MLflow database, made once: making it takes seconds."""

import shutil

import pytest

from tasks.tracking.reachable import prepare_environment


@pytest.fixture(scope="session")
def migrated_db(tmp_path_factory):
    """An empty store."""
    prepare_environment()
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def runs(tmp_path, migrated_db):
    """A runs folder with a store of its own."""
    folder = tmp_path / "runs"
    (folder / "r1").mkdir(parents=True)
    shutil.copy(migrated_db, folder / "mlflow.db")
    return folder
