"""Files between machines without a shared disk: through Ray's object store.

A run's folder lies on the driver's disk. A process that sees it uses it; one that does not, on
another machine, gets what it reads as a parcel and gives back as one what it wrote.
"""

import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.atomic import write_atomic


@dataclass(frozen=True)
class Parcel:
    """The files of a folder, in the object store of the machine that packed them."""

    files: Mapping[str, Any]
    """Object reference (uint8 array) by path inside the folder."""


def pack(folder: Path) -> Parcel:
    """Put every file of `folder` into the object store; they stay while the parcel is held."""
    import numpy as np
    import ray

    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return Parcel(
        {p.relative_to(folder).as_posix(): ray.put(np.fromfile(p, dtype=np.uint8)) for p in paths}
    )


def unpack(parcel: Parcel, folder: Path) -> Path:
    """Write a parcel's files into `folder`, each whole or not at all; returns the folder."""
    import ray

    for name, reference in parcel.files.items():
        write_atomic(folder / name, memoryview(ray.get(reference)).tobytes())
    return folder


def beacon(folder: Path) -> Path:
    """A new file in `folder`, of a name nobody can have by chance: who sees it shares the disk."""
    return write_atomic(folder / f".seen-{secrets.token_hex(16)}", b"")


class Depot:
    """Where one process reads and writes: the run's own folders, or copies of its own of them."""

    def __init__(self, seen: Path) -> None:
        """`seen`: the driver's beacon."""
        self.shared = seen.exists()
        self._copies = None if self.shared else tempfile.TemporaryDirectory(prefix="rl-pipeline-")

    def incoming(self, folder: Path, parcel: Parcel | None) -> Path:
        """Where to read what the driver has in `folder`."""
        if self.shared or parcel is None:
            return folder
        return unpack(parcel, self._copy(folder))

    def outgoing(self, folder: Path) -> Path:
        """Where to write what the driver wants in `folder`."""
        return folder if self.shared else self._copy(folder)

    def parcel(self, written: Path) -> Parcel | None:
        """What the driver has to fetch of a folder written here; None = it is there already."""
        return None if self.shared else pack(written)

    def _copy(self, folder: Path) -> Path:
        """An empty folder for the copy of `folder`; an older copy is forgotten."""
        assert self._copies is not None
        copy = Path(self._copies.name) / folder.name
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        return copy
