"""The stages in order: what each needs, which settings reach it, whose code it is, its call.

No Prefect here: the stage process imports this module. A stage sees only the settings in its slice
(the rest is at its default), so a key outside the slice cannot change its result unnoticed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.schema import PipelineConfig
from configs.schema.data import FileSource
from configs.schema.model import GgufPackageModel, PretrainedModel
from tasks.artifacts import hash_file, hash_tree

MISSING = "missing"


@dataclass(frozen=True)
class StageSpec:
    """One stage of the pipeline."""

    name: str
    inputs: tuple[str, ...]
    """Stages whose records it gets."""
    slice: tuple[str, ...]
    """Dotted config keys that reach it."""
    entry: str
    """`module:function` called as `(config, inputs, out_dir, report, facts) -> ArtifactRecord`."""
    code: tuple[str, ...]
    """Modules its import closure starts from; all files beside the first one count too."""
    shown: tuple[str, ...] = ()
    """Keys it sees that change nothing a later stage reads; they do not make it run again."""
    optional: tuple[str, ...] = ()
    """Records it gets on some runs only, such as what a night took in."""


STAGES: dict[str, StageSpec] = {
    spec.name: spec
    for spec in (
        StageSpec(
            name="data",
            inputs=(),
            slice=("data.source", "data.seed", "data.gate"),
            entry="tasks.stage_calls:data",
            code=("tasks.data.stage",),
            shown=("data.rl_bands",),  # only checked against the bands there are
            optional=("intake", "releases"),
        ),
        StageSpec(
            name="sft",
            inputs=("data",),
            slice=("model", "sft", "system_prompt"),
            entry="tasks.stage_calls:sft",
            code=("tasks.sft.stage",),
            optional=("start",),
        ),
        StageSpec(
            name="rl",
            inputs=("data", "sft"),
            slice=("model.max_length", "rl", "system_prompt", "tools", "data.rl_bands"),
            entry="tasks.stage_calls:rl",
            code=("tasks.rl.stage",),
            shown=("cost",),
        ),
        StageSpec(
            name="evaluation",
            inputs=("data", "sft", "rl"),
            slice=("evaluation", "system_prompt", "tools"),
            entry="tasks.stage_calls:evaluation",
            code=("tasks.evaluation.stage",),
        ),
        StageSpec(
            name="quantize",
            inputs=("data", "sft", "rl"),
            slice=(
                "quantize",
                "evaluation.sampling.max_new_tokens",
                "evaluation.sampling.max_turns",
                "system_prompt",
                "tools",
            ),
            entry="tasks.stage_calls:quantize",
            code=("quantize.stage", "tasks.greedy_answers", "tasks.greedy_transcripts"),
        ),
        StageSpec(
            name="package",
            inputs=("data", "sft", "rl", "evaluation", "quantize"),
            slice=(
                "package",
                "profile",
                "model",
                "evaluation.sampling.max_new_tokens",
                "evaluation.sampling.max_turns",
                "system_prompt",
                "tools",
            ),
            entry="tasks.stage_calls:package",
            code=("deployment.jetson.stage",),
        ),
    )
}

BESIDE: dict[str, StageSpec] = {
    spec.name: spec
    for spec in (
        StageSpec(
            name="challenge",
            inputs=("data", "rl", "package", "champion_rl", "champion_package"),
            slice=(
                "promotion.problems",
                "evaluation.bootstrap_resamples",
                "quantize.parallel_sequences",
            ),
            entry="tasks.stage_calls:challenge",
            code=("tasks.evaluation.challenge", "tasks.greedy_answers"),
        ),
    )
}
"""Work that some runs do beside the stages, kept and supervised like them."""


def stage_spec(name: str) -> StageSpec:
    """The stage of this name, one of the pipeline's or one beside it.

    Raises:
        KeyError: there is none.
    """
    return STAGES[name] if name in STAGES else BESIDE[name]


def _by_head(paths: Iterable[tuple[str, ...]]) -> dict[str, list[tuple[str, ...]]]:
    heads: dict[str, list[tuple[str, ...]]] = {}
    for head, *tail in paths:
        heads.setdefault(head, []).append(tuple(tail))
    return heads


def _mask(value: Any, default: Any, paths: list[tuple[str, ...]]) -> Any:
    """`default` with `value` at `paths`; an empty path takes the whole value."""
    if () in paths or not isinstance(value, BaseModel):
        return value
    update = {
        head: _mask(getattr(value, head), getattr(default, head), tails)
        for head, tails in _by_head(paths).items()
    }
    return default.model_copy(update=update)


def masked(config: PipelineConfig, paths: tuple[str, ...]) -> PipelineConfig:
    """The config as a stage sees it: keys under `paths` as they are, all others at default."""
    split = [tuple(path.split(".")) for path in paths]
    result: PipelineConfig = _mask(config, PipelineConfig(), split)
    return result


def slice_values(config: PipelineConfig, paths: tuple[str, ...]) -> dict[str, Any]:
    """Every leaf under `paths` by dotted key, as plain JSON data; a list is a leaf."""
    full = config.model_dump(mode="json")
    leaves: dict[str, Any] = {}
    for path in paths:
        value: Any = full
        for part in path.split("."):
            value = value[part]
        _flatten(path, value, leaves)
    return leaves


def _flatten(prefix: str, value: Any, leaves: dict[str, Any]) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}", inner, leaves)
    else:
        leaves[prefix] = value


def _hash_path(path: Path) -> str:
    if path.is_file():
        return hash_file(path)
    return hash_tree(path) if path.is_dir() else MISSING


def _package_file(model: GgufPackageModel) -> Path:
    spec = find_spec(model.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0], model.file) if folders else Path(MISSING)


def external_inputs(stage: str, config: PipelineConfig) -> dict[str, str]:
    """Hashes of the user's own files a stage reads, by config key; `missing` where not local."""
    source, model = config.data.source, config.model
    if stage == "data" and isinstance(source, FileSource):
        files = {"data.source.train": source.train, "data.source.heldout": source.heldout}
        return {key: _hash_path(Path(path)) for key, path in files.items() if path is not None}
    if stage == "sft" and isinstance(model, PretrainedModel):
        return {"model.path": _hash_path(Path(model.path))}
    if stage == "sft" and isinstance(model, GgufPackageModel):
        return {"model.file": _hash_path(_package_file(model))}
    return {}


def may_go_online(config: PipelineConfig) -> bool:
    """Whether the config names something that is not on this machine (a public id)."""
    named = [config.model.path] if isinstance(config.model, PretrainedModel) else []
    if isinstance(config.data.source, FileSource):
        named += [p for p in (config.data.source.train, config.data.source.heldout) if p]
    return any(not Path(name).exists() for name in named)
