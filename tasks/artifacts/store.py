"""The folder of one stage output: what it holds, by hash, and whether it still holds it.

Layout of `runs/store/<stage>/<key16>/`: the stage's own files, and `.stage/` with what the
machinery keeps about them (`key.json`, `finished.json`, `request.json`, `log.txt`, …).
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.atomic import write_json
from tasks.artifacts.content_hash import hash_file, hash_json
from tasks.artifacts.record import ArtifactRecord

CONTROL = ".stage"
KEY_CHARS = 16
_UNVERIFIED_FILES = ("progress.json",)
_UNVERIFIED_FOLDERS = (CONTROL, "checkpoints")  # a checkpoint is verified by its own loader


@dataclass(frozen=True)
class Finished:
    """A whole output: its record, every file with hash and size, and what making it took."""

    record: ArtifactRecord
    files: dict[str, dict[str, Any]]
    wall_s: float
    peak_tree_bytes: int | None
    mlflow_run_id: str | None


@dataclass(frozen=True)
class Verdict:
    """What a look at the folder found: `finished`, or the reason it cannot be used."""

    finished: Finished | None
    corrupt: tuple[str, ...] = ()
    """Files whose bytes differ from their recorded hash, or that are gone."""

    @property
    def reason(self) -> str:
        """Why it cannot be reused; empty where it can."""
        if self.finished is not None:
            return ""
        if self.corrupt:
            more = f" and {len(self.corrupt) - 1} more" if len(self.corrupt) > 1 else ""
            return f"artefact corrupted: {self.corrupt[0]}{more}"
        return "not finished"


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Sha256 and size of every file of an output, by relative path."""
    files = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        skipped = relative.parts[0] in _UNVERIFIED_FOLDERS or str(relative) in _UNVERIFIED_FILES
        if path.is_file() and not skipped:
            files[relative.as_posix()] = {"sha256": hash_file(path), "size": path.stat().st_size}
    return files


class StageFolder:
    """One stage output under one cache key."""

    def __init__(self, store: Path, stage: str, key: str) -> None:
        self.stage = stage
        self.key = key
        self.path = store / stage / key[:KEY_CHARS]
        self.control = self.path / CONTROL
        self._mark = self.control / "finished.json"

    @property
    def log_path(self) -> Path:
        """What the stage process printed."""
        return self.control / "log.txt"

    def finish(
        self,
        record: ArtifactRecord,
        *,
        wall_s: float,
        peak_tree_bytes: int | None = None,
        mlflow_run_id: str | None = None,
    ) -> Finished:
        """Hash every file and mark the output whole; the mark is written last."""
        finished = Finished(record, list_files(self.path), wall_s, peak_tree_bytes, mlflow_run_id)
        body = {
            "key": self.key,
            "record": record.model_dump(mode="json"),
            "files": finished.files,
            "wall_s": wall_s,
            "peak_tree_bytes": peak_tree_bytes,
            "mlflow_run_id": mlflow_run_id,
            "finished_at": time.time(),
        }
        write_json(self._mark, {**body, "self_sha256": hash_json(body)})
        return finished

    def verify(self) -> Verdict:
        """Re-hash every file of a finished output."""
        if not self._mark.exists():
            return Verdict(None)
        finished = self.read_mark()
        if finished is None:
            return Verdict(None, (f"{CONTROL}/finished.json",))
        bad = [name for name, facts in finished.files.items() if not self._holds(name, facts)]
        return Verdict(None, tuple(bad)) if bad else Verdict(finished)

    def read_mark(self) -> Finished | None:
        """What the mark says, files unread; None where it is gone, cut off or changed."""
        try:
            body = json.loads(self._mark.read_bytes())
            expected = body.pop("self_sha256")
            if hash_json(body) != expected or body["key"] != self.key:
                return None
            return Finished(
                ArtifactRecord.model_validate(body["record"]),
                body["files"],
                body["wall_s"],
                body["peak_tree_bytes"],
                body["mlflow_run_id"],
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None

    def _holds(self, name: str, facts: dict[str, Any]) -> bool:
        path = self.path / name
        try:
            return bool(path.stat().st_size == facts["size"]) and hash_file(path) == facts["sha256"]
        except OSError:
            return False

    def reopen(self, corrupt: tuple[str, ...] = ()) -> None:
        """Unmark the output; corrupt files move to `<key16>.corrupt/`, so a rerun cannot read them.

        What is whole stays: a long stage goes on from its own checkpoint.
        """
        self._mark.unlink(missing_ok=True)
        aside = self.path.with_name(self.path.name + ".corrupt")
        for name in corrupt:
            source = self.path / name
            if source.is_file():
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, target)

    def discard(self) -> None:
        """Take the whole output away (a forced rerun starts from nothing)."""
        if self.path.exists():
            doomed = self.path.with_name(f"{self.path.name}.discarded")
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(self.path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def finished_outputs(store: Path) -> Iterator[tuple[StageFolder, Finished]]:
    """Every whole output of a store, by stage and key; files are not re-hashed."""
    for mark in sorted(store.glob(f"*/*/{CONTROL}/finished.json")):
        folder = StageFolder(store, mark.parts[-4], _key_of(mark))
        finished = folder.read_mark() if folder.control == mark.parent else None
        if finished is not None:
            yield folder, finished


def _key_of(mark: Path) -> str:
    """The whole key of a mark, of which the folder's name has the beginning."""
    try:
        return str(json.loads(mark.read_bytes())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
