"""Units, compose file and Dockerfile of a server that stays: well-formed, hardened, like `up`."""

import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.services.specs import Ports, service_specs

SERVER = Path(__file__).resolve().parents[3] / "deployment" / "server"
UNITS = sorted(SERVER.glob("*.service"))
PYTHON = "/srv/rl-pipeline/.venv/bin/python"
SETTINGS = {
    "prefect": (
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED",
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED",
        "PREFECT__SERVER_FINAL",
    ),
    "mlflow": ("MLFLOW_SERVER_ENABLE_JOB_EXECUTION",),
    "worker": ("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "PREFECT_CLIENT_MAX_RETRIES"),
    "reconciler": (),
}
"""Settings that must be the same however a service is started."""


def unit(path):
    """Sections of a unit; a key that is given more than once is a list of lines."""

    class Lines(dict):
        def __setitem__(self, key, value):
            if isinstance(value, list) and key in self:
                self[key].extend(value)
            else:
                super().__setitem__(key, value)

    parser = configparser.RawConfigParser(strict=False, dict_type=Lines, delimiters=("=",))
    parser.optionxform = str
    parser.read(path)
    return parser


def environment(path):
    """What a unit's `Environment=` lines say."""
    lines = unit(path)["Service"]["Environment"].split("\n")
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """What `rl-pipeline up` starts."""
    return service_specs(tmp_path_factory.mktemp("runs"), Ports(), Path("/srv/rl-pipeline"))


def test_there_is_a_unit_for_each_service():
    assert [path.stem for path in UNITS] == [
        "rl-pipeline-mlflow",
        "rl-pipeline-prefect",
        "rl-pipeline-reconciler",
        "rl-pipeline-worker",
    ]


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.stem)
def test_units_are_valid_and_hardened(path, tmp_path):
    for other in UNITS:  # they name one another
        text = other.read_text().replace(PYTHON, "/usr/bin/env")  # the one that is installed there
        (tmp_path / other.name).write_text(text)
    here = tmp_path / path.name
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(here)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(here)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert rated.returncode == 0, rated.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.stem)
def test_units_start_what_up_starts(path, specs):
    name = path.stem.removeprefix("rl-pipeline-")
    theirs, ours = environment(path), specs[name].environment
    assert {k: theirs[k] for k in SETTINGS[name]} == {k: ours[k] for k in SETTINGS[name]}
    started = unit(path)["Service"]["ExecStart"].removeprefix(f"{PYTHON} ").split()
    own = " ".join(specs[name].command[1:]).replace(f"--name {_worker(specs)} ", "")
    assert " ".join(started) == own
    assert unit(path)["Service"]["Restart"] == "always"


def _worker(specs):
    command = specs["worker"].command
    return command[command.index("--name") + 1]


@pytest.fixture(scope="module")
def compose():
    """The compose file."""
    return yaml.safe_load((SERVER / "compose.yaml").read_text())


def test_compose_publishes_on_this_machine_only_and_needs_a_password(compose):
    services = compose["services"]
    assert set(services) == {"postgres", "prefect", "mlflow", "worker"}
    published = [port for s in services.values() for port in s.get("ports", [])]
    assert sorted(published) == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000"]
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith(
        "${POSTGRES_PASSWORD:?"
    )
    for name in ("prefect", "mlflow", "worker"):
        assert services[name]["cap_drop"] == ["ALL"] and services[name]["read_only"] is True
        assert "no-new-privileges:true" in services[name]["security_opt"]


@pytest.mark.parametrize("name", ["prefect", "mlflow", "worker"])
def test_compose_starts_what_up_starts(name, compose, specs):
    theirs, ours = compose["services"][name]["environment"], specs[name].environment
    assert {k: theirs[k] for k in SETTINGS[name]} == {k: ours[k] for k in SETTINGS[name]}
    command = compose["services"][name]["command"]
    expected = {
        "prefect": "uvicorn --factory prefect.server.api.server:create_app",
        "mlflow": "mlflow server --host 0.0.0.0 --port 5000 --workers 1",
        "worker": "--pool rl-pipeline --type process",
    }
    assert expected[name] in " ".join(command.split())


def test_each_program_has_a_database_of_its_own(compose):
    services = compose["services"]
    prefect = services["prefect"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    mlflow = services["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"]
    assert prefect.startswith("postgresql+asyncpg://") and prefect.endswith("/prefect")
    assert mlflow.startswith("postgresql+psycopg2://") and mlflow.endswith("/mlflow")
    assert "CREATE DATABASE mlflow" in compose["configs"]["second_database"]["content"]


def test_the_image_is_built_from_the_lock_and_runs_as_nobody_special():
    text = (SERVER / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.11", text, re.MULTILINE)
    assert "-r requirements.lock" in text and "--no-deps" in text
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "rl-pipeline"


def test_no_file_holds_a_secret():
    for path in SERVER.iterdir():
        for line in path.read_text().splitlines():
            if re.search(r"(?i)password[^A-Z_]*[=:]", line) and not line.lstrip().startswith("#"):
                assert "${" in line, f"{path.name}: {line}"
