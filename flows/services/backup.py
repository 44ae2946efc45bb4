"""Copies of both databases, taken while the servers run, before a migration or on demand."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from flows.services.databases import Database, condition, databases
from tasks.artifacts import hash_file, write_json
from tasks.artifacts.atomic import fsync_folder

BACKUPS = "backups"
_DUMP_TIMEOUT_S = 3600.0


class BackupError(RuntimeError):
    """A database could not be copied; nothing was migrated."""


def backups_dir(runs_dir: Path) -> Path:
    """Folder of backups; each is a folder whose name is its UTC time, so names sort by age."""
    return runs_dir / BACKUPS


def backup_databases(runs_dir: Path, *, reason: str = "on demand") -> Path | None:
    """Copy both databases into a new folder under `runs/backups`; None where neither exists yet.

    The folder holds `prefect.db` and `mlflow.db` (SQLite) or `.dump` files (`pg_dump -Fc`), and
    `backup.json` with hashes, versions and the reason.

    Raises:
        BackupError: a copy failed or pg_dump is missing; no half backup is left.
        DatabaseUnusableError, DatabaseUrlError: see `services_databases`.
    """
    found = [of for of in databases(runs_dir) if _exists(of)]
    if not found:
        return None
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    final = backups_dir(runs_dir) / stamp
    partial = final.with_name(f".{stamp}.partial")
    partial.mkdir(parents=True)
    try:
        facts = {of.name: _copy(of, partial) for of in found}
        body = {"made_at": time.time(), "reason": reason, "databases": facts}
        write_json(partial / "backup.json", body)
        os.replace(partial, final)
        fsync_folder(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _exists(of: Database) -> bool:
    if of.postgresql is None:
        return of.path.exists() and of.path.stat().st_size > 0
    return condition(of) != "new"


def _copy(of: Database, folder: Path) -> dict[str, Any]:
    if of.postgresql is None:
        path = folder / f"{of.name}.db"
        _copy_sqlite(of, path)
    else:
        path = folder / f"{of.name}.dump"
        _dump_postgresql(of, path)
    facts = {"file": path.name, "sha256": hash_file(path), "size": path.stat().st_size}
    return {**facts, "of": of.shown, "package": of.package}


def _copy_sqlite(of: Database, target: Path) -> None:
    """A consistent copy through SQLite's own backup, whatever is being written meanwhile."""
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{of.path.as_uri()}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
            (verdict,) = copy.execute("PRAGMA quick_check").fetchone()
    except sqlite3.Error as error:
        raise BackupError(f"the {of.name} database at {of.path}: {error}") from error
    if verdict != "ok":
        raise BackupError(
            f"the copy of the {of.name} database at {of.path} is damaged: {verdict}; the original "
            "is too: restore an older backup, or mend it with sqlite3's .recover"
        )


def _dump_postgresql(of: Database, target: Path) -> None:
    program = shutil.which("pg_dump")
    if program is None:
        raise BackupError(
            f"pg_dump is missing, so the {of.name} database at {of.shown} cannot be backed up "
            "before its migration; install PostgreSQL's client programs (Debian and Ubuntu: "
            "apt-get install postgresql-client), or back it up yourself and upgrade it by hand"
        )
    command = [program, "--format=custom", "--no-password", f"--file={target}"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **connection_environment(of)},  # not argv: that anybody can read
            capture_output=True,
            text=True,
            timeout=_DUMP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackupError(f"pg_dump of {of.shown} took over {_DUMP_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise BackupError(f"pg_dump of {of.shown} failed: {done.stderr.strip()}")


def connection_environment(of: Database) -> dict[str, str]:
    """libpq's environment variables for a PostgreSQL database."""
    parts = urlsplit(f"postgresql://{of.postgresql}")
    given = {
        "PGHOST": parts.hostname,
        "PGPORT": str(parts.port) if parts.port else None,
        "PGUSER": unquote(parts.username) if parts.username else None,
        "PGPASSWORD": unquote(parts.password) if parts.password else None,
        "PGDATABASE": unquote(parts.path.lstrip("/")),
    }
    return {name: value for name, value in given.items() if value}
