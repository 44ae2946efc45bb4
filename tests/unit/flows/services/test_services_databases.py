"""Where the databases are and whether the installed programs may touch them."""

import sqlite3

import pytest
from alembic.script import ScriptDirectory

from flows.services import databases as services_databases
from flows.services.databases import (
    DATABASE_VARIABLES,
    DatabaseNewerError,
    DatabaseUnusableError,
    DatabaseUrlError,
    check_databases,
    condition,
    database,
    databases,
    known_revisions,
)

PREFECT, MLFLOW = DATABASE_VARIABLES["prefect"], DATABASE_VARIABLES["mlflow"]


@pytest.fixture(autouse=True)
def _no_postgresql(monkeypatch):
    for variable in DATABASE_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def with_revision(path, revision):
    """An SQLite database that says it has this schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (revision,))


def test_without_a_variable_both_are_separate_sqlite_files_under_the_runs_folder(tmp_path):
    prefect, mlflow = databases(tmp_path)
    assert prefect.server_url == f"sqlite+aiosqlite:///{tmp_path}/prefect/prefect.db"
    assert mlflow.server_url == f"sqlite:///{tmp_path}/mlflow.db"
    assert prefect.shown == f"{tmp_path}/prefect/prefect.db"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%40ss@h:5433/db?sslmode=require",
        "postgres://u:p%40ss@h:5433/db?sslmode=require",
        "postgresql+psycopg2://u:p%40ss@h:5433/db?sslmode=require",
        "  postgresql+asyncpg://u:p%40ss@h:5433/db?sslmode=require ",
    ],
)
def test_any_postgresql_address_gets_the_driver_each_program_wants(tmp_path, url):
    rest = "u:p%40ss@h:5433/db?sslmode=require"
    environment = {PREFECT: url, MLFLOW: url}
    assert database("prefect", tmp_path, environment).server_url == f"postgresql+asyncpg://{rest}"
    assert database("mlflow", tmp_path, environment).server_url == f"postgresql+psycopg2://{rest}"
    assert database("mlflow", tmp_path, environment).shown == "PostgreSQL h:5433/db"


@pytest.mark.parametrize(
    "url",
    ["mysql://u:secret@h/db", "secret", "postgresql://u:secret@h", "postgresql://u:secret@h/"],
)
def test_an_address_that_cannot_be_used_is_refused_without_showing_its_password(tmp_path, url):
    with pytest.raises(DatabaseUrlError, match=MLFLOW) as caught:
        database("mlflow", tmp_path, {MLFLOW: url})
    assert "secret" not in str(caught.value)
    assert "postgresql://user:password@host" in str(caught.value)


def test_one_database_for_both_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(PREFECT, "postgresql://a:b@h/same")
    monkeypatch.setenv(MLFLOW, "postgresql://c:d@h/same")
    with pytest.raises(DatabaseUrlError, match="same database"):
        databases(tmp_path)
    monkeypatch.setenv(MLFLOW, "postgresql://c:d@h/other")
    assert len(databases(tmp_path)) == 2


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
@pytest.mark.parametrize("postgresql", [None, "h/db"])
def test_revisions_read_as_text_are_those_alembic_finds(tmp_path, name, postgresql):
    of = services_databases.Database(name, tmp_path, postgresql)
    scripts = services_databases._revision_files(of)[0].parent
    root = scripts.parents[1] if name == "prefect" else scripts.parent
    alembic = ScriptDirectory(str(root), version_locations=[str(scripts)])
    every = {script.revision for script in alembic.walk_revisions()}
    assert known_revisions(of) == (every, alembic.get_current_head())


def test_conditions_of_a_database(tmp_path):
    prefect, mlflow = databases(tmp_path)
    assert check_databases(tmp_path) == {"prefect": "new", "mlflow": "new"}
    mlflow.path.touch()  # made by a connection that wrote nothing
    assert condition(mlflow) == "new"
    with_revision(mlflow.path, known_revisions(mlflow)[1])
    assert condition(mlflow) == "current"
    known, head = known_revisions(prefect)
    with_revision(prefect.path, min(known - {head}))
    assert check_databases(tmp_path) == {"prefect": "older", "mlflow": "current"}


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path):
    mlflow = databases(tmp_path)[1]
    with_revision(mlflow.path, "ffff00001111")
    before = mlflow.path.read_bytes()
    with pytest.raises(DatabaseNewerError, match=r"ffff00001111, which mlflow 3\.") as caught:
        check_databases(tmp_path)
    assert "restore the backup" in str(caught.value)
    assert mlflow.path.read_bytes() == before


def test_what_is_no_database_is_named(tmp_path):
    prefect = databases(tmp_path)[0]
    prefect.path.parent.mkdir()
    prefect.path.write_text("not a database" * 100)
    with pytest.raises(
        DatabaseUnusableError, match=r"prefect\.db cannot be read: .*not a database"
    ):
        check_databases(tmp_path)


def test_a_postgresql_server_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(MLFLOW, "postgresql://u:secret@127.0.0.1:1/db")
    with pytest.raises(DatabaseUnusableError, match=r"127\.0\.0\.1:1/db cannot be read") as caught:
        check_databases(tmp_path)
    assert "secret" not in str(caught.value)


def test_an_installation_without_one_newest_schema_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(services_databases, "_revision_files", lambda of: [])
    with pytest.raises(DatabaseUnusableError, match="0 newest schema revisions"):
        known_revisions(databases(tmp_path)[0])
