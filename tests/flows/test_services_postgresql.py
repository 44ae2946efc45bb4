"""Both servers on a real PostgreSQL: migrated by them, backed up, a newer version refused."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import psycopg2
import pytest
from service_stack import Stack, free_port

from flows.services.backup import backup_databases
from flows.services.databases import DatabaseNewerError, check_databases

pytestmark = [pytest.mark.needs("initdb", "postgres", "pg_dump"), pytest.mark.timeout(900)]
PASSWORD = "p@ss/word"
QUOTED = "p%40ss%2Fword"


def as_server_user(command):
    """PostgreSQL refuses to run as root; then it runs as the user its package made, or `nobody`."""
    if os.getuid() != 0:
        return command
    with contextlib.suppress(KeyError):
        import pwd

        pwd.getpwnam("postgres")
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Port of a PostgreSQL with a database for each program."""
    folder = Path(subprocess.check_output(as_server_user(["mktemp", "-d"]), text=True).strip())
    port = free_port()
    secret = folder / "password"
    subprocess.run(
        as_server_user(["sh", "-c", f"umask 077; echo '{PASSWORD}' > {secret}"]), check=True
    )
    make = [
        "initdb",
        "-D",
        f"{folder}/data",
        "-U",
        "ops",
        "--pwfile",
        str(secret),
        "-A",
        "scram-sha-256",
    ]
    subprocess.run(
        as_server_user([*make, "-E", "UTF8", "--no-sync"]), check=True, capture_output=True
    )
    options = ["-c", f"port={port}", "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
    sockets = ["-c", f"unix_socket_directories={folder}"]
    process = subprocess.Popen(
        as_server_user(["postgres", "-D", f"{folder}/data", *options, *sockets]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _make_databases(port)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def connect(port, name):
    """A connection that commits each statement."""
    connection = psycopg2.connect(
        host="127.0.0.1", port=port, user="ops", password=PASSWORD, dbname=name, connect_timeout=5
    )
    connection.autocommit = True
    return contextlib.closing(connection)


def _make_databases(port):
    import time

    deadline_s = time.monotonic() + 60
    while True:
        try:
            with connect(port, "postgres") as connection, connection.cursor() as cursor:
                cursor.execute("CREATE DATABASE prefect")
                cursor.execute("CREATE DATABASE mlflow")
            return
        except psycopg2.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def rows(port, name, query):
    """What a query answers."""
    with connect(port, name) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchall()


@pytest.fixture(scope="module")
def stack(server, tmp_path_factory):
    """Services on that PostgreSQL, named in two forms people use."""
    folder = tmp_path_factory.mktemp("postgresql")
    (folder / "home").mkdir()
    environment = {
        "RL_PIPELINE_PREFECT_DATABASE_URL": f"postgres://ops:{QUOTED}@127.0.0.1:{server}/prefect",
        "RL_PIPELINE_MLFLOW_DATABASE_URL": f"postgresql://ops:{QUOTED}@127.0.0.1:{server}/mlflow",
    }
    stack = Stack(folder / "runs", folder / "home", environment=environment)
    done = stack.up()
    assert done.returncode == 0, done.stdout + done.stderr
    yield stack
    stack.down()


@pytest.fixture
def configured(stack, monkeypatch):
    """The variables in this process."""
    for name, value in stack.environment.items():
        monkeypatch.setenv(name, value)


def test_both_servers_keep_their_rows_in_postgresql(stack, server):
    deployed = rows(server, "prefect", "SELECT name FROM deployment ORDER BY name")
    assert ("rl-pipeline",) in deployed
    assert rows(server, "mlflow", "SELECT name FROM experiments") == [("Default",)]
    assert not (stack.runs / "mlflow.db").exists()
    assert not (stack.runs / "prefect" / "prefect.db").exists()
    shown = "".join(" ".join(p.cmdline()) for p in stack.living())
    assert PASSWORD not in shown and QUOTED not in shown
    for log in (stack.runs / "services").glob("*"):
        assert PASSWORD not in log.read_text() and QUOTED not in log.read_text()


def test_both_are_dumped_and_a_dump_can_be_restored(stack, server, configured, tmp_path):
    folder = backup_databases(stack.runs)
    assert {p.name for p in folder.iterdir()} == {"backup.json", "prefect.dump", "mlflow.dump"}
    assert QUOTED not in (folder / "backup.json").read_text()
    rows_before = rows(server, "mlflow", "SELECT name FROM experiments")
    with connect(server, "postgres") as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE restored")
    subprocess.run(
        ["pg_restore", "--dbname=restored", str(folder / "mlflow.dump")],
        env={**os.environ, "PGHOST": "127.0.0.1", "PGPORT": str(server), "PGUSER": "ops",
             "PGPASSWORD": PASSWORD},
        check=True,
    )  # fmt: skip
    assert rows(server, "restored", "SELECT name FROM experiments") == rows_before


def test_a_newer_database_is_refused_and_left_as_it_is(stack, server, configured):
    assert check_databases(stack.runs) == {"prefect": "current", "mlflow": "current"}
    (found,) = rows(server, "mlflow", "SELECT version_num FROM alembic_version")
    update = "UPDATE alembic_version SET version_num = %s"
    with connect(server, "mlflow") as connection, connection.cursor() as cursor:
        cursor.execute(update, ("ffff00001111",))
        with pytest.raises(DatabaseNewerError, match="ffff00001111"):
            check_databases(stack.runs)
        cursor.execute("SELECT version_num FROM alembic_version")
        assert cursor.fetchone() == ("ffff00001111",)
        cursor.execute(update, found)
    assert check_databases(stack.runs)["mlflow"] == "current"
