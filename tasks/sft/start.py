"""A night that goes on from an earlier release: its weights become this run's frozen snapshot.

So RL knows one beginning only, `snapshot/`, wherever it came from, and its KL reference is that.
"""

import os
import shutil
from pathlib import Path

from tasks.artifacts import ArtifactRecord
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.artifacts.folder import replace_folder
from tasks.artifacts.progress import Reporter
from tasks.models.load import hash_model

INPUT = "start"
"""Name of the optional input: the record of the release's policy, or of its snapshot."""


def adopt(start: ArtifactRecord, out_dir: Path, report: Reporter) -> ArtifactRecord:
    """Make `snapshot/` of the weights in `start`, by hard links where the disk can.

    Raises:
        ArtifactCorruptError: there are none, or they are not those of the record.
    """
    source = _weights(start)
    report.progress(0, 1, f"taking over {source}")
    with replace_folder(out_dir / "snapshot") as fresh:
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            target = fresh / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, target)
    found = hash_model(out_dir / "snapshot")
    if found != start.sha256:
        raise ArtifactCorruptError(
            f"{source} hashes to {found[:12]}, its record says {start.sha256[:12]}; bring it back "
            "from a backup, or set nightly.start_from=base",
            source,
        )
    report.progress(1, 1, f"starts from {found[:12]}")
    return ArtifactRecord(
        kind="model",
        uri=out_dir.as_posix(),
        sha256=found,
        meta={"adopted_from": start.uri, "steps": 0},
    )


def _weights(start: ArtifactRecord) -> Path:
    """The model folder of a policy or a snapshot."""
    for name in ("policy", "snapshot"):
        if (start.path / name).is_dir():
            return start.path / name
    raise ArtifactCorruptError(
        f"{start.path} holds no policy and no snapshot to start from; bring it back from a backup, "
        "or set nightly.start_from=base",
        start.path,
    )


def link_or_copy(source: Path, target: Path) -> None:
    """One more name for the same bytes; a copy where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
