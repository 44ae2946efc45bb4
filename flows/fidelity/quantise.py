"""`rl-pipeline quantise`: finds a policy and what it is judged by, explores, picks, writes."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import load_config
from configs.schema import PipelineConfig
from configs.schema.quantize import QuantType, recipe_of
from flows.fidelity.frontier_plot import plot
from flows.report.data import RunFiles
from quantize.architecture import read_shape
from quantize.convert import convert
from quantize.errors import FrontierError
from quantize.explore import Explorer, Material
from quantize.frontier import Choice, Point, Wish, as_json, pick, point_of
from quantize.imatrix import write_imatrix
from quantize.imatrix_compare import own_matrix
from quantize.repair_run import LARGER
from quantize.rollouts import IMATRIX, PARITY, read_rollouts, take
from tasks.artifacts import ArtifactRecord, write_json
from tasks.greedy_answers import greedy_answers

FRONTIER = "frontier.json"
FOLDER = "quantise"
Progress = Callable[[str], None]


class NoPolicyError(FileNotFoundError):
    """There is no policy where one was asked for, or something it needs is missing."""


@dataclass(frozen=True)
class Policy:
    """A policy and what its quantisations are judged by."""

    folder: Path
    """HF folder."""
    rollouts: Path
    config: PipelineConfig
    data: Path | None
    """Folder with `heldout.jsonl`; None where there is none."""
    made: Path | None
    """Folder of the quantise stage, where it ran."""
    out_dir: Path
    """Where results go unless told otherwise."""


@dataclass(frozen=True)
class Result:
    """What was made."""

    points: list[Point]
    choice: Choice
    file: Path
    plots: tuple[Path, Path]
    """PNG and SVG."""


def find_policy(path: Path, config: PipelineConfig | None, data: Path | None) -> Policy:
    """The policy of a run's folder, of an RL stage's folder, or an HF folder beside its rollouts.

    `config` is needed where the folder is no run's.

    Raises:
        NoPolicyError: what is missing, and what to give.
    """
    if (path / "records.json").is_file():
        found = _of_run(path)
        return found if data is None else Policy(**{**vars(found), "data": data})
    folder = path / "policy" if (path / "policy" / "config.json").is_file() else path
    if not (folder / "config.json").is_file():
        raise NoPolicyError(
            f"{path} is neither a run's folder nor a policy's; give one of them, as in runs/latest "
            "or runs/store/rl/KEY/policy"
        )
    rollouts = _rollouts(folder.parent)
    chosen = config or load_config("calculator", [])
    return Policy(folder, rollouts, chosen, data, None, Path("quantised"))


def _of_run(run_dir: Path) -> Policy:
    files = RunFiles(run_dir)
    rl = files.folder("rl")
    if rl is None:
        raise NoPolicyError(
            f"{run_dir}: this run has no policy (no rl record, or its folder is gone); finish it: "
            "rl-pipeline run"
        )
    config = load_config(str(run_dir / "config.json"), [])
    made = files.folder("quantize")
    data = files.folder("data")
    return Policy(rl / "policy", _rollouts(rl), config, data, made, run_dir / FOLDER)


def _rollouts(folder: Path) -> Path:
    path = folder / "rollouts.jsonl"
    if not path.is_file():
        raise NoPolicyError(
            f"no rollouts at {path}; the importance matrix and KL need the policy's own rollouts, "
            "which the rl stage writes beside its policy folder"
        )
    return path


def quantise_policy(
    policy: Policy,
    wish: Wish,
    out_dir: Path,
    *,
    problems: int | None,
    threads: int,
    progress: Progress,
) -> Result:
    """Explore the frontier, pick what the wish asks for, write the file, the plot and the JSON.

    Raises:
        FrontierError: no file fulfils the wish; the frontier is written all the same.
        QuantizeError: whatever else went wrong, by name.
    """
    types = _types(wish)
    out_dir.mkdir(parents=True, exist_ok=True)
    material = _material(policy, out_dir, problems, threads, progress)
    explorer = Explorer(material, out_dir / ".work", progress, _known(policy, material))
    points = explorer.explore(types, wish.size_bytes)
    try:
        write_json(out_dir / FRONTIER, as_json(points))
        plot(points, None, out_dir)
        choice = pick(points, wish)
        file = explorer.make(choice.point, out_dir / f"{choice.point.name}.gguf")
        write_json(out_dir / FRONTIER, as_json(points, choice))
        plots = plot(points, choice.point, out_dir)
    finally:
        shutil.rmtree(out_dir / ".work", ignore_errors=True)  # a killed attempt's too
    return Result(points, choice, file, plots)


def _types(wish: Wish) -> Sequence[QuantType]:
    """All of them: a frontier with one type is a point."""
    if wish.name is not None and recipe_of(wish.name) not in LARGER:
        raise FrontierError(f"--type {wish.name}: expected one of {', '.join(LARGER)}")
    return LARGER


def _material(
    policy: Policy, out_dir: Path, problems: int | None, threads: int, progress: Progress
) -> Material:
    """F16 and the importance matrix, the stage's own where it ran, else made in `out_dir`."""
    config = policy.config.quantize
    rollouts = read_rollouts(policy.rollouts)
    length = int(read_shape(policy.folder).kv["context_length"])
    f16, imatrix = ((policy.made or out_dir) / name for name in ("F16.gguf", "imatrix.gguf"))
    if not f16.is_file():
        progress("convert to GGUF F16")
        convert(policy.folder, f16)
    if not imatrix.is_file():
        progress("importance matrix from the policy's rollouts")
        chosen = take(rollouts, IMATRIX, config.imatrix_rollouts, length)
        matrix = own_matrix(policy.folder, chosen, config.imatrix_weights)
        write_imatrix(matrix, imatrix, "policy rollouts")
    answer = None
    if policy.data is not None:
        inputs = {
            "rl": _record("model", policy.folder.parent),
            "data": _record("dataset", policy.data),
        }
        answer = greedy_answers(policy.config, inputs, threads)
    return Material(
        f16=f16,
        imatrix=imatrix,
        rollouts=take(rollouts, PARITY, config.parity_rollouts, length),
        config=config,
        problems=problems or config.accuracy_problems,
        answer_greedily=answer,
        threads=threads,
    )


def _record(kind: str, folder: Path) -> ArtifactRecord:
    return ArtifactRecord(kind=kind, uri=folder.as_posix(), sha256="0" * 64)


def _known(policy: Policy, material: Material) -> dict[str, Point]:
    """What the stage measured already, on the same rollouts and as many problems."""
    path = None if policy.made is None else policy.made / "parity.json"
    if path is None or not path.is_file():
        return {}
    parity: dict[str, Any] = json.loads(path.read_bytes())
    if parity.get("accuracy_problems") != material.problems:
        return {}
    return {name: point_of(name, facts) for name, facts in parity["quant"].items() if name != "F16"}
