"""Backups of SQLite databases; those of PostgreSQL are tested with a real server."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from flows.services import backup as services_backup
from flows.services.backup import BackupError, backup_databases, backups_dir, connection_environment
from flows.services.databases import Database, databases
from tasks.artifacts import hash_file


@pytest.fixture(autouse=True)
def _no_postgresql(monkeypatch):
    for variable in ("RL_PIPELINE_PREFECT_DATABASE_URL", "RL_PIPELINE_MLFLOW_DATABASE_URL"):
        monkeypatch.delenv(variable, raising=False)


def fill(path: Path, rows: int = 1) -> None:
    """A database with some rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (n INTEGER)")
        connection.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(rows)])


def rows(path: Path) -> int:
    """How many rows a database holds."""
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT count(*) FROM t").fetchone()[0]


def test_nothing_to_back_up(tmp_path):
    assert backup_databases(tmp_path) is None
    assert not backups_dir(tmp_path).exists()


def test_both_are_copied_with_hashes_and_a_reason(tmp_path):
    prefect, mlflow = databases(tmp_path)
    fill(prefect.path, 3)
    fill(mlflow.path, 5)
    folder = backup_databases(tmp_path, reason="before an upgrade")
    assert folder.parent == backups_dir(tmp_path)
    assert (rows(folder / "prefect.db"), rows(folder / "mlflow.db")) == (3, 5)
    facts = json.loads((folder / "backup.json").read_text())
    assert facts["reason"] == "before an upgrade"
    assert facts["databases"]["mlflow"]["sha256"] == hash_file(folder / "mlflow.db")
    assert facts["databases"]["prefect"]["package"].startswith("prefect 3.")
    assert os.listdir(backups_dir(tmp_path)) == [folder.name]


def test_a_database_that_is_being_written_is_copied_as_it_was_last_committed(tmp_path):
    mlflow = databases(tmp_path)[1]
    fill(mlflow.path, 4)
    with sqlite3.connect(mlflow.path) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (99)")
        folder = backup_databases(tmp_path)
        assert rows(folder / "mlflow.db") == 4
        writer.commit()
    second = backup_databases(tmp_path)
    assert rows(second / "mlflow.db") == 5
    assert sorted([second.name, folder.name]) == [folder.name, second.name]


def test_a_damaged_database_leaves_no_half_backup(tmp_path):
    prefect, mlflow = databases(tmp_path)
    fill(prefect.path)
    mlflow.path.write_text("no database" * 1000)
    with pytest.raises(BackupError, match="mlflow"):
        backup_databases(tmp_path)
    assert os.listdir(backups_dir(tmp_path)) == []


def test_without_pg_dump_nothing_is_migrated_and_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    of = Database("mlflow", tmp_path, "u:secret@h/db")
    with pytest.raises(BackupError, match="apt-get install postgresql-client") as caught:
        services_backup._copy(of, tmp_path)
    assert "secret" not in str(caught.value)


def test_a_password_goes_to_pg_dump_by_the_environment_alone(tmp_path):
    of = Database("mlflow", tmp_path, "us%40er:p%2Fw@h:5433/my%20db?sslmode=require")
    assert connection_environment(of) == {
        "PGHOST": "h",
        "PGPORT": "5433",
        "PGUSER": "us@er",
        "PGPASSWORD": "p/w",
        "PGDATABASE": "my db",
    }
    assert connection_environment(Database("mlflow", tmp_path, "h/db")) == {
        "PGHOST": "h",
        "PGDATABASE": "db",
    }
