"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.artifacts.atomic import fsync_folder
from tasks.artifacts.errors import ArtifactWriteError


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder` to write into; it takes its place when the block ends well.

    Raises:
        ArtifactWriteError: the disk refused; the old folder, if any, is untouched.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        fsync_folder(folder.parent)
    except OSError as error:
        raise ArtifactWriteError(
            f"could not write {folder}: {error.strerror or error}; free some space or choose "
            "another run folder, then run again: finished stages are reused",
            folder,
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
