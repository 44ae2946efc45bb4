"""The commands: what they say and how they end. Starting for real is shown elsewhere."""

import os
import sqlite3

import psutil
import pytest
from typer.testing import CliRunner

from deployment.service_files import SERVICES, state_path
from flows.cli import app
from flows.commands.services import _span
from tasks.artifacts import write_json

RUNNER = CliRunner()


def run(*arguments, **environment):
    """A command and its output on both streams."""
    return RUNNER.invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", **environment})


@pytest.mark.parametrize("command", ["up", "down", "ps", "backup"])
def test_help_teaches_with_an_example(command):
    shown = run(command, "--help")
    assert shown.exit_code == 0 and f"Example: rl-pipeline {command}" in shown.output


def test_ps_tells_running_crashed_and_stopped_apart(tmp_path):
    assert run("ps", "--runs", tmp_path).output.count("stopped") == len(SERVICES)
    me = psutil.Process()
    for name, pid in (("prefect", me.pid), ("mlflow", 2**22 - 1)):
        body = {"name": name, "url": "http://127.0.0.1:1", "pid": pid, "started": me.create_time()}
        write_json(state_path(tmp_path, name), body)
    shown = run("ps", "--runs", tmp_path)
    assert shown.exit_code == 1
    by_name = {line.split()[0]: line for line in shown.output.splitlines() if line.split()}
    assert "not answering" in by_name["prefect"] and str(os.getpid()) in by_name["prefect"]
    assert "crashed" in by_name["mlflow"] and "stopped" in by_name["worker"]


def test_down_without_services_says_so(tmp_path):
    shown = run("down", "--runs", tmp_path)
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.output.splitlines()] == list(reversed(SERVICES))
    assert shown.output.count("did not run") == len(SERVICES)


def test_up_refuses_bad_input_before_it_starts_anything(tmp_path):
    wrong = run(
        "up", "--runs", tmp_path, RL_PIPELINE_MLFLOW_DATABASE_URL="mysql://u:secret@host/db"
    )
    assert wrong.exit_code == 2
    assert "RL_PIPELINE_MLFLOW_DATABASE_URL" in wrong.output and "secret" not in wrong.output
    assert "Traceback" not in wrong.output
    assert run("up", "--prefect-port", "0").exit_code == 2
    assert not list((tmp_path / "services").glob("*.json"))


def test_up_refuses_a_database_of_a_newer_version_before_it_starts_anything(tmp_path):
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('ffff00001111')")
    shown = run("up", "--runs", tmp_path, "--prefect-port", "4997", "--mlflow-port", "4998")
    assert shown.exit_code == 1 and "a newer version wrote it" in shown.output
    assert not list((tmp_path / "services").glob("*.json"))


def test_backup_names_its_folder(tmp_path):
    assert "no database yet" in run("backup", "--runs", tmp_path).output
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("CREATE TABLE t (n INTEGER)")
    shown = run("backup", "--runs", tmp_path)
    assert shown.output.strip() == str(next((tmp_path / "backups").iterdir()))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 min 0 s"), (61.9, "1 min 1 s"), (3599, "59 min 59 s"), (3661, "1 h 1 min"),
     (172799, "47 h 59 min"), (180000, "2 d 2 h")],
)  # fmt: skip
def test_spans(seconds, shown):
    assert _span(seconds) == shown
