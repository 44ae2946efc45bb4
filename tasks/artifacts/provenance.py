"""Where this code stands: project root, git state, lock files, versions."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tasks.artifacts.content_hash import hash_file, hash_json

GIT_TIMEOUT_S = 10.0
_LOCK_PATTERNS = ("*.lock", "requirements*.txt", "pylock*.toml")


@dataclass(frozen=True)
class GitState:
    """Commit and whether tracked files differ from it; both None outside a repository."""

    sha: str | None
    dirty: bool | None


def project_root() -> Path:
    """The folder that holds the packages `flows`, `tasks`, `configs`, `quantize`, `deployment`."""
    return Path(__file__).resolve().parents[2]


def module_environment() -> dict[str, str]:
    """Our environment, in which `python -m tasks.…` works from any working directory."""
    path = [str(project_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_state(root: Path | None = None) -> GitState:
    """Commit of the project and its dirty flag; unknown stays None."""
    root = root or project_root()
    sha = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no") if sha else None
    return GitState(sha, None if status is None else bool(status))


def lock_files(root: Path | None = None) -> dict[str, str]:
    """Sha256 of every lock file in the project root, by name."""
    root = root or project_root()
    found = {path for pattern in _LOCK_PATTERNS for path in root.glob(pattern)}
    return {path.name: hash_file(path) for path in sorted(found) if path.is_file()}


def lock_sha256(root: Path | None = None) -> str:
    """One hash over all lock files."""
    return hash_json(lock_files(root))


def runtime_versions() -> dict[str, str]:
    """Python and torch, without importing torch; a missing package reads `absent`."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "absent"
    return {"python": platform.python_version(), "torch": torch}
