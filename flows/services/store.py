"""The stores between versions and folders: migration behind a backup, addresses that can move.

A run without a server keeps its artefacts under an absolute `file://` address. The server hands
artefacts out itself, so such an address becomes `mlflow-artifacts:/…`, relative to wherever the
server keeps them: the folder may then be moved, or another machine may read them.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flows.services.backup import backup_databases
from flows.services.databases import Database, check_databases, connect, databases
from tasks.artifacts.provenance import module_environment

PROXIED = "mlflow-artifacts:/"
_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
_MIGRATION_TIMEOUT_S = 1800.0
Tell = Callable[[str, str], None]
"""Told `(service, what happens)`."""


class MlflowMigrationError(RuntimeError):
    """MLflow could not bring its database to its own version."""


def prepare_databases(runs_dir: Path, tell: Tell) -> None:
    """Before anything opens them: refuse newer ones, back up what is older, migrate MLflow's.

    Prefect's server migrates its own at its start; MLflow refuses an older one until it is told.

    Raises:
        DatabaseNewerError, DatabaseUnusableError, DatabaseUrlError: see `services_databases`.
        BackupError: no backup could be made; nothing was migrated.
        MlflowMigrationError: MLflow refused.
    """
    conditions = check_databases(runs_dir)
    older = [f"migrating {name}" for name, found in conditions.items() if found == "older"]
    if older:
        _back_up(runs_dir, " and ".join(older), tell)
    if conditions["mlflow"] == "older":
        migrate_mlflow(databases(runs_dir)[1])


def release_artifacts(runs_dir: Path, tell: Tell) -> None:
    """Have MLflow's database name artefacts relative to its server; a backup comes first.

    Raises:
        BackupError: no backup could be made; nothing was changed.
    """
    of = databases(runs_dir)[1]
    if check_databases(runs_dir)["mlflow"] == "new":
        return
    addresses = absolute_addresses(of, runs_dir)
    if addresses:
        _back_up(runs_dir, "making artefact addresses movable", tell)
        make_movable(of, addresses)
        tell("mlflow", f"{len(addresses)} artefact addresses no longer name this folder")


def _back_up(runs_dir: Path, what: str, tell: Tell) -> None:
    folder = backup_databases(runs_dir, reason=f"before {what}")
    tell("databases", f"backed up to {folder} before {what}")


def migrate_mlflow(of: Database) -> None:
    """Bring the schema to the installed version; the caller has made a backup.

    Raises:
        MlflowMigrationError: MLflow refused; shows what it said.
    """
    code = (
        "import os; from mlflow.store.db.utils import _upgrade_db, create_sqlalchemy_engine; "
        "_upgrade_db(create_sqlalchemy_engine(os.environ['RL_PIPELINE_MIGRATE']))"
    )
    done = subprocess.run(  # its own command would show a database password in the process list
        [sys.executable, "-c", code],
        env={**module_environment(), "RL_PIPELINE_MIGRATE": of.sync_url},
        capture_output=True,
        text=True,
        timeout=_MIGRATION_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise MlflowMigrationError(
            f"{of.package} could not migrate {of.shown}; the backup in runs/backups is whole:\n"
            f"{tail}"
        )


def movable(uri: str, artifacts: Path) -> str | None:
    """The address relative to the server's artefacts; None where it stays as it is.

    An address under another `mlartifacts` folder is taken too where the same entry exists under
    ours: the folder was moved here.
    """
    if not uri.startswith("file:"):
        return None
    path = Path(unquote(urlsplit(uri).path))
    for folder in (path, *path.parents):
        if folder.name != artifacts.name:
            continue
        inside = path.relative_to(folder)
        if folder == artifacts or (artifacts / inside).exists():
            tail = "" if inside == Path() else inside.as_posix()
            return f"{PROXIED}{tail}"
    return None


@dataclass(frozen=True)
class Address:
    """One absolute address of an artefact in MLflow's database."""

    table: str
    column: str
    old: str
    new: str


def absolute_addresses(of: Database, runs_dir: Path) -> list[Address]:
    """Addresses of our artefacts that name this machine's folder; none once they are rewritten."""
    from sqlalchemy import text

    artifacts, found = (runs_dir / "mlartifacts").resolve(), []
    engine = connect(of)
    try:
        with engine.connect() as connection:
            for table, column in _COLUMNS:
                query = f"SELECT DISTINCT {column} FROM {table} WHERE {column} LIKE 'file:%'"
                for (old,) in connection.execute(text(query)).all():
                    if (new := movable(old, artifacts)) is not None:
                        found.append(Address(table, column, old, new))
    finally:
        engine.dispose()
    return found


def make_movable(of: Database, addresses: Iterable[Address]) -> None:
    """Rewrite the addresses, all or none."""
    from sqlalchemy import text

    engine = connect(of)
    try:
        with engine.begin() as connection:
            for each in addresses:
                update = f"UPDATE {each.table} SET {each.column} = :new WHERE {each.column} = :old"
                connection.execute(text(update), {"new": each.new, "old": each.old})
    finally:
        engine.dispose()
