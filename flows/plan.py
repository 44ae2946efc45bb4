"""What a run would do: for each stage, reuse its output or run, and why. Starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.schema import PipelineConfig
from flows.quarantine.decisions import released_rows
from tasks.artifacts import ArtifactRecord
from tasks.artifacts.store import StageFolder
from tasks.cache_keys import StageKey, explain, key_parts, stage_key
from tasks.stages import STAGES, StageSpec

RUNS = Path("runs")


@dataclass(frozen=True)
class StagePlan:
    """One line of the plan."""

    stage: str
    action: Literal["HIT", "RUN"]
    why: str
    key: str | None
    """The cache key; None while an input is still to be made."""


def plan(
    config: PipelineConfig, *, runs_dir: Path = RUNS, force: Sequence[str] = ()
) -> list[StagePlan]:
    """HIT or RUN for every stage, in order; outputs are re-hashed."""
    store = runs_dir / "store"
    records: dict[str, ArtifactRecord] = released_rows(runs_dir)
    lines = []
    for spec in STAGES.values():
        missing = [name for name in spec.inputs if name not in records]
        if missing:
            lines.append(
                StagePlan(spec.name, "RUN", _why_waiting(store, spec, config, missing), None)
            )
            continue
        key = stage_key(spec, config, records)
        line, record = _look(store, key, forced=spec.name in force)
        lines.append(line)
        if record is not None:
            records[spec.name] = record
    return lines


def _look(store: Path, key: StageKey, *, forced: bool) -> tuple[StagePlan, ArtifactRecord | None]:
    """Whether the output under `key` can be reused."""
    if forced:
        return StagePlan(key.stage, "RUN", "forced", key.sha256), None
    verdict = StageFolder(store, key.stage, key.sha256).verify()
    if verdict.finished is not None:
        return StagePlan(key.stage, "HIT", "nothing it depends on changed", key.sha256), (
            verdict.finished.record
        )
    why = verdict.reason if verdict.corrupt else explain(store, key.stage, key.parts)
    return StagePlan(key.stage, "RUN", why, key.sha256), None


def _why_waiting(
    store: Path, spec: StageSpec, config: PipelineConfig, missing: Sequence[str]
) -> str:
    """Why a stage whose inputs are still to be made is expected to run."""
    own = explain(store, spec.name, key_parts(spec, config))
    waiting = f"input {', '.join(missing)} is made anew"
    if own == "first run":
        return own
    if own.startswith("its last output"):  # nothing of its own changed
        return f"{waiting} (reused after all if that comes out the same)"
    return f"{own}; {waiting}"
