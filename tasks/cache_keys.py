"""The cache key of a stage: everything its output depends on, and why it must run again.

Key = sha256 of the parts: config slice, input hashes, the user's files, the import closure of the
stage's code, lock files, Python and torch. The parts lie beside every output (`.stage/key.json`)
and in `runs/store/<stage>/last.json`, so that the next run can say what changed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from tasks.artifacts import ArtifactRecord, hash_json, write_json
from tasks.artifacts.provenance import lock_files, runtime_versions
from tasks.artifacts.store import StageFolder
from tasks.code_closure import code_closure
from tasks.stages import StageSpec, external_inputs, slice_values

MAX_REASONS = 3
_ABSENT = object()
_LABELS = {
    "config": "config {name} {old} -> {new}",
    "inputs": "input {name} {verb}",
    "files": "file {name} changed",
    "code": "code {name} {verb}",
    "lock": "lock {name} {verb}",
    "versions": "{name} {old} -> {new}",
}


@dataclass(frozen=True)
class StageKey:
    """A cache key and the parts it is the hash of."""

    stage: str
    parts: dict[str, dict[str, Any]]

    @property
    def sha256(self) -> str:
        """The key."""
        return hash_json({"stage": self.stage, **self.parts})


def stage_key(
    spec: StageSpec, config: PipelineConfig, inputs: Mapping[str, ArtifactRecord]
) -> StageKey:
    """The key of `spec` under `config` with `inputs`: all of `spec.inputs`, of `optional` any."""
    parts = key_parts(spec, config)
    given = (*spec.inputs, *(name for name in spec.optional if name in inputs))
    parts["inputs"] = {name: inputs[name].sha256 for name in given}
    return StageKey(spec.name, parts)


def key_parts(spec: StageSpec, config: PipelineConfig) -> dict[str, dict[str, Any]]:
    """Every part but the inputs' hashes, which are known only when the inputs are."""
    return {
        "config": slice_values(config, spec.slice),
        "files": dict(external_inputs(spec.name, config)),
        "code": code_closure(spec.code),
        "lock": dict(lock_files()),
        "versions": dict(runtime_versions()),
    }


def _short(value: Any) -> str:
    text = "(unset)" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two sets of parts, in words; what `new` lacks is not compared."""
    reasons = []
    for part, template in _LABELS.items():
        if part not in new:
            continue
        before, after = old.get(part, {}), new[part]
        for name in sorted(before.keys() | after.keys()):
            was, now = before.get(name, _ABSENT), after.get(name, _ABSENT)
            if was != now:
                verb = "added" if was is _ABSENT else "removed" if now is _ABSENT else "changed"
                reasons.append(
                    template.format(name=name, old=_short(was), new=_short(now), verb=verb)
                )
    return reasons


def summarise(reasons: list[str]) -> str:
    """The first reasons and how many more there are."""
    more = len(reasons) - MAX_REASONS
    return "; ".join(reasons[:MAX_REASONS]) + (f"; and {more} more" if more > 0 else "")


def last_parts(store: Path, stage: str) -> dict[str, Any] | None:
    """The parts of the stage's last finished run; None on a first run."""
    try:
        found = json.loads((store / stage / "last.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def remember(folder: StageFolder, key: StageKey, store: Path, *, finished: bool) -> None:
    """Write the parts beside the output, and as the stage's last where it is finished."""
    body = {"key": key.sha256, "stage": key.stage, **key.parts}
    write_json(folder.control / "key.json", body)
    if finished:
        write_json(store / key.stage / "last.json", body)


def explain(store: Path, stage: str, parts: Mapping[str, Any]) -> str:
    """Why a stage without a reusable output under this key must run."""
    last = last_parts(store, stage)
    if last is None:
        return "first run"
    reasons = differences(last, parts)
    return summarise(reasons) if reasons else "its last output is gone or was not finished"
