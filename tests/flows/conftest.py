"""The pipeline with the tiny stages, in a folder of its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_stages

from configs.schema import PipelineConfig
from tasks.events import Event

HERE = Path(__file__).parent


@pytest.fixture
def tiny_pipeline(tmp_path, monkeypatch):
    """Run the real flow over the tiny stages; returns `(summary, events)`."""
    from flows.launch import run_pipeline
    from tasks import stages

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    for name, spec in tiny_stages.specs().items():
        monkeypatch.setitem(stages.STAGES, name, spec)
    for name, spec in tiny_stages.beside_specs().items():
        monkeypatch.setitem(stages.BESIDE, name, spec)

    def run(config: PipelineConfig | None = None, **options) -> tuple[dict, list[Event]]:
        events: list[Event] = []
        path = run_pipeline(config or PipelineConfig(), on_event=events.append, **options)
        return json.loads(path.read_bytes()), events

    return run


@pytest.fixture
def behave(monkeypatch) -> Callable[..., None]:
    """Tell tiny stages to misbehave: `behave(rl="hang")`."""

    def tell(**what: str) -> None:
        monkeypatch.setenv(tiny_stages.BEHAVIOUR, json.dumps(what))

    return tell


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory):
    """One Prefect server for the tests that do not need their own."""
    from flows.prefect_server import TemporaryServer

    with TemporaryServer(tmp_path_factory.mktemp("prefect"), "flow-tests") as server:
        server.wait()
        yield server.url


@pytest.fixture
def server(shared_server, tiny_pipeline, monkeypatch):
    """Runs of this test use the shared server, as a configured one."""
    from flows.launch import settings_from_environment

    monkeypatch.setenv("PREFECT_API_URL", shared_server)
    monkeypatch.setenv("PREFECT_LOGGING_TO_API_ENABLED", "false")
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "CRITICAL")
    with settings_from_environment():  # an earlier test may have had Prefect read them before
        yield


@pytest.fixture(scope="session")
def migrated_db(tmp_path_factory):
    """An empty MLflow store, made once: making it takes seconds."""
    from tasks.tracking.reachable import prepare_environment

    prepare_environment()
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def migrated_only(migrated_db, tiny_pipeline):
    """The runs folder starts with a migrated store."""
    Path("runs").mkdir()
    shutil.copy(migrated_db, "runs/mlflow.db")


@pytest.fixture
def migrated(migrated_only, server):
    """A migrated store and the shared server."""
