"""A quick look whether an MLflow store answers, so that a dead one costs seconds, not minutes.

MLflow itself waits 20 s for a locked SQLite file and retries HTTP for minutes.
"""

import contextlib
import os
import socket
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

SQLITE_WAIT_S = 2.0
CONNECT_WAIT_S = 3.0
_SQLITE = "sqlite:///"

SETTINGS = {
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what goes wrong is said by the tracker, in one line
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def prepare_environment() -> None:
    """Keep MLflow's own HTTP retries short and its log quiet, unless the user set them."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def why_unreachable(uri: str) -> str | None:
    """None where the store takes a write lock or a connection; else why not."""
    if uri.startswith(_SQLITE):
        return _sqlite_problem(Path(unquote(uri[len(_SQLITE) :])))
    if uri.startswith(("http://", "https://")):
        return _http_problem(uri)
    return None


def _sqlite_problem(path: Path) -> str | None:
    if not path.exists():
        return None  # MLflow makes it
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=SQLITE_WAIT_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.Error as error:
        return f"{path}: {error}"
    return None


def _http_problem(uri: str) -> str | None:
    parts = urlsplit(uri)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_WAIT_S):
            return None
    except OSError as error:
        return f"{uri}: {error}"
