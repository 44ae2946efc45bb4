"""One checkpoint per cycle: both sides' state in a folder that appears whole or not at all.

Safetensors and JSON only: the learner's tensors, the samples in the buffer, the loop's state. The
manifest, written last, names every file's hash, the learner's tensors, the config and the snapshot
it belongs to, and its own hash; all are verified before anything is loaded.
"""

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.atomic import dump_json, fsync_folder, write_json
from tasks.artifacts.content_hash import hash_file, hash_json
from tasks.artifacts.typed_file import write_typed
from tasks.rl.errors import CheckpointMismatchError
from tasks.rl.types import Group

MANIFEST = "manifest.json"
ATTEMPTS = "attempts.json"
BUFFER = "buffer.json.gz"
KEEP = 2


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk that has been verified."""

    folder: Path
    step: int
    attempt: int
    learner: Mapping[str, str]
    """Hash of each part of the learner."""
    loop: Mapping[str, Any]
    """State of queue, controllers, sentinel and ledger."""


class Checkpoints:
    """The checkpoints of one RL stage folder."""

    def __init__(self, root: Path, identity: Mapping[str, str]) -> None:
        """`identity`: what a checkpoint must belong to, such as config and snapshot hashes."""
        self._root = root
        self._identity = dict(identity)

    def begin_attempt(self) -> int:
        """A number no attempt had before, those killed before their first checkpoint included."""
        path = self._root / ATTEMPTS
        started = int(json.loads(path.read_text())["started"]) if path.exists() else 0
        write_json(path, {"started": started + 1})
        return started

    async def write(
        self,
        step: int,
        attempt: int,
        loop: Mapping[str, Any],
        buffered: Sequence[Group],
        save_learner: Callable[[Path], Awaitable[dict[str, str]]],
    ) -> None:
        """Write a checkpoint beside the others, then forget all but the newest two."""
        final = self._root / f"step-{step:06d}"
        temporary = self._root / f".step-{step:06d}.partial"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        learner = await save_learner(temporary)
        write_typed(temporary / BUFFER, tuple[Group, ...], tuple(buffered))
        files = {p.name: hash_file(p) for p in sorted(temporary.iterdir())}
        manifest = {
            "step": step,
            "attempt": attempt,
            "identity": self._identity,
            "learner": learner,
            "files": files,
            "loop": dict(loop),
        }
        sha256 = hash_json(json.loads(dump_json(manifest)))  # as a reader will have it
        write_json(temporary / MANIFEST, {**manifest, "sha256": sha256})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        fsync_folder(self._root)
        for old in self._finished()[:-KEEP]:
            shutil.rmtree(old)

    def latest(self) -> Saved | None:
        """The newest whole checkpoint; a damaged newest one gives way to the one before.

        Raises:
            CheckpointMismatchError: checkpoints exist, and none of them is whole, or the newest
                belongs to another config or snapshot.
        """
        damaged = []
        for folder in reversed(self._finished()):
            manifest = _manifest(folder / MANIFEST)
            if manifest is None:
                damaged.append(f"{folder.name} ({MANIFEST})")
                continue
            if manifest["identity"] != self._identity:
                theirs = manifest["identity"].items()
                different = sorted({k for k, _ in theirs ^ self._identity.items()})
                raise CheckpointMismatchError(
                    f"{folder} belongs to another run: {', '.join(different)} differ; move the "
                    "folder away to start RL anew"
                )
            wrong = [
                name
                for name, sha256 in manifest["files"].items()
                if not (folder / name).exists() or hash_file(folder / name) != sha256
            ]
            if not wrong:
                return Saved(
                    folder,
                    manifest["step"],
                    manifest["attempt"],
                    manifest["learner"],
                    manifest["loop"],
                )
            damaged.append(f"{folder.name} ({', '.join(wrong)})")
        if damaged:
            raise CheckpointMismatchError(
                f"every checkpoint in {self._root} is damaged: {'; '.join(damaged)}; move the "
                "folder away to start RL anew"
            )
        return None

    def _finished(self) -> list[Path]:
        return sorted(self._root.glob("step-*"))


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest, or None where it is not as it was written."""
    try:
        manifest = dict(json.loads(path.read_bytes()))
        sha256 = manifest.pop("sha256", None)
        return manifest if sha256 == hash_json(manifest) else None
    except (FileNotFoundError, TypeError, ValueError):
        return None
