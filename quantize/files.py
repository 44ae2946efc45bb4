"""Large files written in place of each other: a temporary file beside the target, then a rename."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.artifacts.atomic import fsync_folder
from tasks.artifacts.errors import ArtifactWriteError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; `path` becomes it when the block ends well, else nothing changes.

    Raises:
        ArtifactWriteError: the disk refused.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        if isinstance(error, ArtifactWriteError):
            raise
        raise ArtifactWriteError(
            f"could not write {path}: {error.strerror or error}; free some space or choose "
            "another run folder, then run again: finished stages are reused",
            path,
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
