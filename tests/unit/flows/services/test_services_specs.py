"""What each service is started with: the traps each of these settings avoids stand beside it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows.services.specs import (
    Ports,
    healthy,
    service_specs,
    service_token,
    shown_runs_dir,
    worker_name,
)
from tasks.process_tree import TOKEN_VARIABLE

ROOT = Path("/srv/checkout")


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """Specs with SQLite, whatever the tester exports."""
    for name in ("PREFECT", "MLFLOW"):
        monkeypatch.delenv(f"RL_PIPELINE_{name}_DATABASE_URL", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    return service_specs(tmp_path, Ports(4301, 5301), ROOT)


def test_servers_listen_on_this_machine_only(specs):
    for name in ("prefect", "mlflow"):
        command = list(specs[name].command)
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert str(specs[name].port) in command
    assert "0.0.0.0" not in " ".join(a for s in specs.values() for a in s.command)


def test_leases_survive_a_restart_and_old_rows_are_vacuumed(specs):
    environment = specs["prefect"].environment
    storage = environment["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]
    assert storage == "prefect.server.concurrency.lease_storage.filesystem"
    assert environment["PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED"] == "events,flow_runs"


def test_mlflow_is_one_worker_without_jobs_and_proxies_artefacts(specs, tmp_path):
    mlflow = specs["mlflow"]
    command = " ".join(mlflow.command)
    assert "--workers 1" in command
    assert "--allowed-hosts 127.0.0.1:5301,localhost:5301" in command
    assert "--default-artifact-root" not in command  # the default is mlflow-artifacts:
    assert mlflow.environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert mlflow.environment["MLFLOW_ARTIFACTS_DESTINATION"] == str(tmp_path / "mlartifacts")
    assert "MLFLOW_TRACKING_URI" not in mlflow.environment


def test_the_worker_reaches_both_servers_and_knows_its_folders(specs, tmp_path):
    environment = specs["worker"].environment
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4301/api"
    assert environment["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5301"
    assert environment["RL_PIPELINE_RUNS"] == str(tmp_path)
    assert environment["RL_PIPELINE_ROOT"] == str(ROOT)
    command = list(specs["worker"].command)
    assert "--limit" not in command, "the pool's limit is the one that survives a resume"


def test_services_send_nothing_home_and_carry_their_mark(specs, tmp_path):
    for name, spec in specs.items():
        assert spec.environment["DO_NOT_TRACK"] == "true"
        assert spec.environment["PREFECT_PLUGINS_ENABLED"] == "false"
        assert spec.environment["PREFECT_HOME"] == str(tmp_path / "prefect")
        assert spec.environment[TOKEN_VARIABLE] == service_token(tmp_path, name)
    assert service_token(tmp_path, "worker") != service_token(tmp_path / "other", "worker")
    assert worker_name(tmp_path) != worker_name(tmp_path / "other")


def test_a_database_password_is_in_no_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_PIPELINE_PREFECT_DATABASE_URL", "postgresql://u:secret@h/prefect")
    monkeypatch.setenv("RL_PIPELINE_MLFLOW_DATABASE_URL", "postgres://u:secret@h/mlflow")
    specs = service_specs(tmp_path, Ports(), ROOT)
    assert "secret" not in " ".join(a for s in specs.values() for a in s.command)
    prefect, mlflow = specs["prefect"].environment, specs["mlflow"].environment
    url = prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    assert url == "postgresql+asyncpg://u:secret@h/prefect"
    assert mlflow["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg2://u:secret@h/mlflow"


@pytest.mark.parametrize(
    ("runs", "shown"),
    [("/srv/checkout/runs", "runs"), ("/srv/checkout/a/b", "a/b"), ("/var/runs", "/var/runs")],
)
def test_a_runs_folder_inside_the_checkout_is_written_down_relative(runs, shown):
    assert shown_runs_dir(Path(runs), ROOT) == shown


@pytest.fixture
def answers():
    """An HTTP server that answers what it is told to: `{path: (status, body)}`."""
    told = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            status, body = told.get(self.path, (404, None))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        do_GET = do_POST = answer

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", told
    server.shutdown()
    server.server_close()


def test_another_program_on_the_port_is_not_our_server(answers, tmp_path):
    url, told = answers
    told["/health"] = (200, {"status": "up"})
    assert not healthy("prefect", url, tmp_path) and not healthy("mlflow", url, tmp_path)
    told["/health"] = (200, True)
    assert healthy("prefect", url, tmp_path)
    told["/health"] = (200, b"OK")
    assert healthy("mlflow", url, tmp_path)
    told["/health"] = (500, True)
    assert not healthy("prefect", url, tmp_path)


def test_the_worker_works_when_prefect_says_so(answers, tmp_path):
    url, told = answers
    filter_path = "/work_pools/rl-pipeline/workers/filter"
    assert not healthy("worker", url, tmp_path)
    mine, other = worker_name(tmp_path), "someone"
    for workers, works in (
        ([], False),
        ([{"name": other, "status": "ONLINE"}], False),
        ([{"name": mine, "status": "OFFLINE"}], False),
        ([{"name": other, "status": "OFFLINE"}, {"name": mine, "status": "ONLINE"}], True),
    ):
        told[filter_path] = (200, workers)
        assert healthy("worker", url, tmp_path) is works
