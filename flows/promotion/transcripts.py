"""What a person looks at before approving: the candidate's answers beside the champion's."""

from pathlib import Path
from typing import Any

from flows.report.data import RunFiles
from flows.report.transcripts import side_by_side, transcripts


def transcripts_of(run_dir: Path) -> list[dict[str, Any]]:
    """Pairs of answers of a run: champion and candidate where they met, else before and after RL.

    Each is `{prompt, kind, gold, sides: [{name, outcome, messages: [{role, content}]}]}`; all text
    is a model's or a data file's and must be escaped by whoever shows it.
    """
    files = RunFiles(run_dir)
    if not files.ran("challenge"):
        return transcripts(files)
    return side_by_side(
        files.lines("challenge", "champion.jsonl"),
        files.lines("challenge", "candidate.jsonl"),
        ("Champion", "Candidate"),
        "the candidate",
    )
