"""The bundle that is deployed: judged here before any device hears of it."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment.jetson.archive import write_archive
from deployment.jetson.on_device.verify import MANIFEST
from deployment.jetson.serve import verified
from tasks.artifacts import hash_file

_HEADROOM = 1 << 20
"""The manifest and its signature stand in no file table."""


@dataclass(frozen=True)
class Cargo:
    """A verified bundle, ready to send."""

    agent: str
    release: str
    """Sha256 of its manifest."""
    archive: Path
    archive_sha256: str
    unpacked_bytes: int
    golden: dict[str, Any]
    source: str
    """The path that was named, for the books."""

    @property
    def sha12(self) -> str:
        """What a device calls it."""
        return self.release[:12]


def _archive_beside(folder: Path) -> Path | None:
    """The archive that the package stage left beside a bundle folder."""
    sha12 = hash_file(folder / MANIFEST)[:12]
    found = sorted(folder.parent.glob(f"*-{sha12}.tar.gz"))
    return found[0] if found else None


@contextlib.contextmanager
def loaded(bundle: Path, allowed_signers: Path) -> Iterator[Cargo]:
    """Verify a bundle folder or archive; its archive is made where there is none.

    Raises:
        BundleError, UnsafeArchiveError: it is refused, as every device would.
    """
    with tempfile.TemporaryDirectory(prefix="rl-pipeline-cargo-") as temporary:
        archive = bundle if bundle.is_file() else _archive_beside(bundle)
        with verified(archive or bundle, allowed_signers) as (folder, manifest):
            release = hash_file(folder / MANIFEST)
            name = str(manifest["name"])
            if archive is None:
                top = f"{name}-{release[:12]}"
                archive = write_archive(folder, Path(temporary) / f"{top}.tar.gz", top)
            size = sum(int(entry["size"]) for entry in manifest["files"].values())
            golden = json.loads((folder / "golden_prompts.json").read_bytes())
            yield Cargo(
                agent=name,
                release=release,
                archive=archive,
                archive_sha256=hash_file(archive),
                unpacked_bytes=size + _HEADROOM,
                golden=golden,
                source=str(bundle),
            )
