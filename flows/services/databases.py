"""The databases of the Prefect server and of MLflow: where they are, which version they hold.

SQLite files under the runs folder unless an environment variable names a PostgreSQL database. A
database that newer code wrote is refused before anything touches it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from sqlalchemy import Engine

Name = Literal["prefect", "mlflow"]
Condition = Literal["new", "current", "older"]
DATABASE_VARIABLES: dict[Name, str] = {
    "prefect": "RL_PIPELINE_PREFECT_DATABASE_URL",
    "mlflow": "RL_PIPELINE_MLFLOW_DATABASE_URL",
}
"""Environment variables that name a PostgreSQL database, `postgresql://user:password@host/name`."""
_DRIVERS: dict[Name, str] = {"prefect": "asyncpg", "mlflow": "psycopg2"}
_POSTGRESQL = frozenset({"postgres", "postgresql"})
_REVISION = re.compile(r"""^revision(?:\s*:\s*str)?\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_DOWN_REVISION = re.compile(r"""^down_revision[^=]*=\s*["']([^"']+)["']""", re.MULTILINE)


class DatabaseUrlError(ValueError):
    """An environment variable names no PostgreSQL database."""


class DatabaseNewerError(RuntimeError):
    """The database holds a schema that the installed version does not know."""


class DatabaseUnusableError(RuntimeError):
    """The database cannot be read: no such server, wrong password, not a database."""


@dataclass(frozen=True)
class Database:
    """One of the two databases."""

    name: Name
    runs_dir: Path
    postgresql: str | None
    """`host/name?…` with user and password, no scheme; None means the SQLite file."""

    @property
    def path(self) -> Path:
        """The SQLite file (also named where PostgreSQL is used, and then not looked at)."""
        file = Path("prefect", "prefect.db") if self.name == "prefect" else Path("mlflow.db")
        return (self.runs_dir / file).resolve()

    @property
    def server_url(self) -> str:
        """The address in the form the server wants, driver included."""
        if self.postgresql is not None:
            return f"postgresql+{_DRIVERS[self.name]}://{self.postgresql}"
        return f"sqlite{'+aiosqlite' if self.name == 'prefect' else ''}:///{self.path}"

    @property
    def sync_url(self) -> str:
        """The address for a plain, synchronous look."""
        if self.postgresql is not None:
            return f"postgresql+psycopg2://{self.postgresql}"
        return f"sqlite:///{self.path}"

    @property
    def shown(self) -> str:
        """The address for people: no user, no password."""
        if self.postgresql is None:
            return str(self.path)
        host = self.postgresql.rpartition("@")[2].partition("?")[0]
        return f"PostgreSQL {host}"

    @property
    def package(self) -> str:
        """The installed program that owns the schema, with its version."""
        return f"{self.name} {version(self.name)}"


def database(name: Name, runs_dir: Path, environment: Mapping[str, str] = os.environ) -> Database:
    """The database as configured.

    Raises:
        DatabaseUrlError: the environment variable is set to something else than PostgreSQL.
    """
    variable = DATABASE_VARIABLES[name]
    url = environment.get(variable, "").strip()
    if not url:
        return Database(name, runs_dir, None)
    scheme, separator, rest = url.partition("://")
    shown = f"{scheme}://…" if separator else "(no scheme)"  # the rest may hold a password
    if not separator or scheme.partition("+")[0] not in _POSTGRESQL:
        raise DatabaseUrlError(
            f"{variable} is {shown}; expected postgresql://user:password@host:5432/database, or "
            "unset for a SQLite file under the runs folder"
        )
    if len(urlsplit(f"postgresql://{rest}").path) < 2:
        raise DatabaseUrlError(
            f"{variable} names no database after the host; expected "
            "postgresql://user:password@host:5432/database"
        )
    return Database(name, runs_dir, rest)


def databases(runs_dir: Path) -> tuple[Database, Database]:
    """Both, as configured; the same database twice is refused.

    Raises:
        DatabaseUrlError: see `database`.
    """
    prefect, mlflow = database("prefect", runs_dir), database("mlflow", runs_dir)
    if prefect.postgresql is not None and prefect.shown == mlflow.shown:
        raise DatabaseUrlError(
            f"{' and '.join(DATABASE_VARIABLES.values())} name the same database; both programs "
            "keep their schema version in the table alembic_version: give each its own database"
        )
    return prefect, mlflow


def _revision_files(of: Database) -> list[Path]:
    """Migration scripts of the installed version; read as text, since importing them takes long."""
    dialect = "sqlite" if of.postgresql is None else "postgresql"
    inside = {
        "prefect": Path("server", "database", "_migrations", "versions", dialect),
        "mlflow": Path("store", "db_migrations", "versions"),
    }[of.name]
    spec = find_spec(of.name)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(Path(roots[0], inside).glob("*.py")) if roots else []


def known_revisions(of: Database) -> tuple[frozenset[str], str]:
    """Every schema revision the installed version knows, and the newest.

    Raises:
        DatabaseUnusableError: the installed version keeps them elsewhere than expected.
    """
    revisions, parents = set(), set()
    for path in _revision_files(of):
        text = path.read_text(encoding="utf-8")
        revisions |= set(_REVISION.findall(text))
        parents |= set(_DOWN_REVISION.findall(text))
    heads = revisions - parents
    if len(heads) != 1:
        raise DatabaseUnusableError(
            f"{of.package} has {len(heads)} newest schema revisions, expected one; install the "
            "locked version: make install"
        )
    return frozenset(revisions), heads.pop()


def condition(of: Database) -> Condition:
    """Whether the database is still to be made, is current, or must be migrated.

    Raises:
        DatabaseNewerError: a newer version wrote it.
        DatabaseUnusableError: it cannot be read.
    """
    found = _stored_revision(of)
    if found is None:
        return "new"
    known, head = known_revisions(of)
    if found not in known:
        raise DatabaseNewerError(
            f"the {of.name} database at {of.shown} has schema revision {found}, which "
            f"{of.package} does not know: a newer version wrote it. Nothing was changed. Install "
            "that version again, or restore the backup made before the upgrade (runs/backups)"
        )
    return "current" if found == head else "older"


def _stored_revision(of: Database) -> str | None:
    """The revision in the database's alembic_version table; None where there is none yet."""
    if of.postgresql is None and (not of.path.exists() or of.path.stat().st_size == 0):
        return None
    from sqlalchemy import inspect, text
    from sqlalchemy.exc import SQLAlchemyError

    engine = connect(of)
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    except SQLAlchemyError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise DatabaseUnusableError(
            f"the {of.name} database at {of.shown} cannot be read: {reason}"
        ) from error
    finally:
        engine.dispose()


def connect(of: Database) -> "Engine":
    """An engine for a plain look, with short patience."""
    from sqlalchemy import create_engine

    patience = {"timeout": 2.0} if of.postgresql is None else {"connect_timeout": 10}
    return create_engine(of.sync_url, connect_args=patience)


def check_databases(runs_dir: Path) -> dict[Name, Condition]:
    """The condition of both, before any server or run may migrate one.

    Raises:
        DatabaseNewerError: a newer version wrote one.
        DatabaseUnusableError: one cannot be read.
        DatabaseUrlError: an environment variable is wrong.
    """
    return {of.name: condition(of) for of in databases(runs_dir)}
