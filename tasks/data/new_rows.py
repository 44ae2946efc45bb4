"""Which training rows an earlier dataset did not have: compared by what they say, not by id."""

from collections import Counter

from tasks.artifacts import ArtifactRecord, hash_json
from tasks.environments.row import read_rows


def new_rows(data: ArtifactRecord, earlier: ArtifactRecord) -> Counter[str]:
    """Training rows of `data` that are not in `earlier`, counted by band.

    Raises:
        OSError: one of the datasets is gone.
    """
    seen = {key for key, _ in _rows(earlier)}
    return Counter(band for key, band in _rows(data) if key not in seen)


def _rows(data: ArtifactRecord) -> list[tuple[str, str]]:
    """Content key and band of each training row."""
    rows = read_rows(data.path / "train.jsonl")
    return [(hash_json([r.prompt, r.answer, r.answer_kind]), r.band) for r in rows]
