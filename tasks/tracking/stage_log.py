"""What MLflow is told of one stage: a nested run with lineage, metrics and files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tasks.artifacts import ArtifactRecord, write_json
from tasks.artifacts.store import CONTROL, Finished, StageFolder
from tasks.tracking.operations import (
    Operation,
    RunStatus,
    create_run,
    end_run,
    log_dataset,
    log_file,
    log_metrics,
    log_model,
    log_params,
    set_tags,
)
from tasks.tracking.tracker import Tracker, owner_tags

Direction = Literal["input", "output"]
PARENT = "run"
"""Our local name of the parent run."""

MODEL_KINDS = frozenset({"model", "quantisations", "bundle"})
MAX_FILE_BYTES = 4 << 20
_FILE_SUFFIXES = frozenset({".json", ".jsonl", ".html", ".md", ".txt"})
_MACHINERY = frozenset({"publish", "checkpoints", "samples", "bundle", CONTROL})
_WEIGHT_FOLDERS = frozenset({"snapshot", "policy", "adapter", "bundle", "checkpoints"})


class StageLog:
    """The nested run of one stage."""

    def __init__(self, tracker: Tracker, stage: str, profile: str) -> None:
        self._tracker = tracker
        self._stage = stage
        self._profile = profile

    def open(self, inputs: Mapping[str, ArtifactRecord], tags: Mapping[str, str]) -> None:
        """Open the run, tagged with the hashes of its inputs, and link them."""
        self._tracker.retry()
        parents = {f"input.{name}.sha256": record.sha256 for name, record in inputs.items()}
        own = {"stage": self._stage, **parents, **owner_tags(), **tags}
        self._tracker.say(
            create_run(self._stage, f"{self._profile}-{self._stage}", PARENT, own),
            *(
                self._link(name, record, "input")
                for name, record in inputs.items()
                if record.kind in MODEL_KINDS or record.kind == "dataset"
            ),
        )

    def params(self, leaves: Mapping[str, Any]) -> None:
        """The settings that reach the stage."""
        params = {name: str(value) for name, value in leaves.items()}
        self._tracker.say(log_params(self._stage, params))

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        """Metric lines of the stage."""
        self._tracker.say(log_metrics(self._stage, lines))

    def output(self, folder: StageFolder, finished: Finished, max_bytes: float) -> None:
        """Every file by hash in a manifest, those up to `max_bytes` themselves, and the model.

        Of an output that is reused, only what people read: the run that made it holds the rest.
        """
        record = finished.record
        kept = self._kept(finished, max_bytes)
        files = {n: {**f, "in_mlflow": n in kept} for n, f in finished.files.items()}
        body = {"record": record.model_dump(mode="json"), "files": files}
        path = write_json(folder.control / "manifest.json", body)
        operations: list[Operation] = [
            set_tags(self._stage, {"output.sha256": record.sha256, "output.uri": record.uri}),
            log_file(self._stage, path, None),
            log_file(self._stage, folder.control / "key.json", None),
        ]
        for name in kept:
            parent = str(Path(name).parent)
            target = None if parent == "." else parent
            operations.append(log_file(self._stage, folder.path / name, target))
        if record.kind in MODEL_KINDS:
            operations.append(self._link(self._stage, record, "output"))
        self._tracker.say(*operations)

    def _kept(self, finished: Finished, max_bytes: float) -> list[str]:
        """Names of the files MLflow is given."""
        sizes = {name: facts["size"] for name, facts in finished.files.items()}
        maker = finished.mlflow_run_id
        made_before = maker is not None and maker != self._tracker.run_id(self._stage)
        if made_before and self._tracker.knows(str(maker)):
            return [name for name, size in sizes.items() if is_readable(name, size)]
        return [name for name, size in sizes.items() if size <= max_bytes and is_artifact(name)]

    def close(self, status: RunStatus) -> None:
        """Close the run."""
        self._tracker.say(end_run(self._stage, status))

    def _link(self, name: str, record: ArtifactRecord, direction: Direction) -> Operation:
        return _link(self._stage, self._profile, name, record, direction)


def is_artifact(name: str) -> bool:
    """Whether a file is part of what a stage made, rather than of how it made it (its hash is in
    the manifest all the same).

    The bundle's files lie in its archive; of the folder itself only the manifest is kept.
    """
    return Path(name).parts[0] not in _MACHINERY or name == "bundle/manifest.json"


def is_readable(name: str, size: int) -> bool:
    """Whether people read a file as it is: no weights, nothing large."""
    parts = Path(name).parts
    if parts[0] in _WEIGHT_FOLDERS or parts[0] == CONTROL:
        return False
    return Path(name).suffix in _FILE_SUFFIXES and size <= MAX_FILE_BYTES


def link_outputs(run: str, profile: str, records: Mapping[str, ArtifactRecord]) -> list[Operation]:
    """What a whole run read and made, linked to its parent run."""
    return [
        _link(run, profile, name, record, "output")
        for name, record in records.items()
        if record.kind in MODEL_KINDS or record.kind == "dataset"
    ]


def _link(
    run: str, profile: str, name: str, record: ArtifactRecord, direction: Direction
) -> Operation:
    """A dataset as input, a model as input or output; `run` is our local name of the run."""
    if record.kind == "dataset":
        return log_dataset(run, name, record.sha256, record.uri, run)
    title = f"{profile}-{name}".replace(".", "-")  # a model's name takes no dots
    return log_model(run, title, record.sha256, record.uri, direction)
