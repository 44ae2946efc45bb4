"""Rows released from the quarantine, as data prep sees them."""

from dataclasses import replace

from tasks.artifacts import ArtifactRecord, hash_file
from tasks.data.candidate import Candidate
from tasks.data.errors import ReleasesChangedError
from tasks.data.sources import Loaded
from tasks.gates.releases import Releases, read_releases


def with_releases(loaded: Loaded, record: ArtifactRecord) -> Loaded:
    """`loaded` with every row told which checks it was released from.

    Raises:
        ReleasesChangedError: the decisions are not those the run began with.
    """
    if not record.path.is_file() or hash_file(record.path) != record.sha256:
        raise ReleasesChangedError(
            f"{record.path} changed after the run began, by `rl-pipeline quarantine release`? Run "
            "again to go by what it says now"
        )
    releases = read_releases(record.path)
    frozen = loaded.frozen
    return replace(
        loaded,
        train=[_told(row, releases) for row in loaded.train],
        heldout=None if loaded.heldout is None else [_told(r, releases) for r in loaded.heldout],
        # a row kept from an earlier night no longer has the words of its file, only its id
        frozen=None
        if frozen is None
        else [replace(r, waived=releases.by_id.get(r.id, frozenset())) for r in frozen],
    )


def _told(row: Candidate, releases: Releases) -> Candidate:
    waived = releases.of(row.shown())
    return replace(row, waived=waived) if waived else row
