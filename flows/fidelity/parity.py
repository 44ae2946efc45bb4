"""`rl-pipeline parity`: finds F16, the quantised files and the problems of a run or a bundle, puts
them side by side, and writes the figures and the page."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from configs.schema import PipelineConfig
from deployment.jetson.on_device import verify
from flows.report.data import RunFiles, quantised
from quantize.parity import RESAMPLES, attribution
from quantize.side_by_side import Played, measure
from tasks.artifacts import hash_file, write_json
from tasks.artifacts.bootstrap import Interval, paired_bootstrap
from tasks.environments.row import Row, read_rows
from tasks.evaluation.selection import stratified
from tasks.evaluation.types import ServedModel
from tasks.greedy_transcripts import greedy_transcripts

F16 = "F16"
RESULT, PAGE = "side_by_side.json", "parity.html"


class ParityInputError(FileNotFoundError):
    """Something the comparison needs is not there; says what, and what to do."""


@dataclass(frozen=True)
class Sides:
    """What is put side by side."""

    title: str
    run_dir: Path
    f16: Path
    files: dict[str, Path]
    """Quantised GGUF files by name."""
    model: ServedModel
    rows: list[Row]
    """Held-out problems, in the order of the run's own answers."""
    snapshot: Path | None
    """The SFT snapshot, as an HF folder."""
    parallel: int


def sides_of(path: Path, runs_dir: Path, problems: int, f16: Path | None = None) -> Sides:
    """The sides of a run's folder, or of a bundle and the run that made it.

    Raises:
        ParityInputError: no run or bundle, a stage that is missing, a file that is not the one it
            should be.
    """
    manifest_path = next(
        (p for p in (path / verify.MANIFEST, path / "bundle" / verify.MANIFEST) if p.is_file()),
        None,
    )
    if (path / "records.json").is_file():
        return _with_f16(_sides_of_run(path, problems), f16)
    if manifest_path is None:
        raise ParityInputError(
            f"{path} is neither a run's folder nor a bundle; give one of them, as in runs/latest"
        )
    manifest = json.loads(manifest_path.read_bytes())
    run_dir = _run_that_made(manifest, runs_dir)
    sides = _sides_of_run(run_dir, problems)
    files = _bundled(manifest, manifest_path.parent)
    title = f"bundle {manifest.get('name')} of run {run_dir.name}"
    return _with_f16(replace(sides, title=title, files=files), f16)


def _with_f16(sides: Sides, f16: Path | None) -> Sides:
    chosen = sides.f16 if f16 is None else f16
    if not chosen.is_file():
        raise ParityInputError(
            f"there is no F16 file at {chosen}; give --f16 FILE, or run the quantize stage again: "
            "rl-pipeline run --force quantize"
        )
    return replace(sides, f16=chosen)


def _sides_of_run(run_dir: Path, problems: int) -> Sides:
    files = RunFiles(run_dir)
    folders = {stage: files.folder(stage) for stage in ("data", "rl", "quantize")}
    missing = [stage for stage, folder in folders.items() if folder is None]
    data, policy, made = folders["data"], folders["rl"], folders["quantize"]
    if data is None or policy is None or made is None:
        raise ParityInputError(
            f"{run_dir}: no output of the stage {', '.join(missing)}; finish the run: rl-pipeline "
            "run --stop-after quantize"
        )
    config = PipelineConfig.model_validate(files.config)
    names = [name for name in quantised(files) if name != F16]
    sft = files.folder("sft")
    return Sides(
        title=f"run {run_dir.resolve().name}",
        run_dir=run_dir,
        f16=made / f"{F16}.gguf",
        files={name: made / f"{name}.gguf" for name in names if (made / f"{name}.gguf").is_file()},
        model=ServedModel(
            made / f"{F16}.gguf",
            policy / "policy",
            config.system_prompt,
            config.tools,
            config.evaluation.sampling,
        ),
        rows=stratified(read_rows(data / "heldout.jsonl"), problems),
        snapshot=sft / "snapshot" if sft is not None else None,
        parallel=config.quantize.parallel_sequences,
    )


def _run_that_made(manifest: Mapping[str, Any], runs_dir: Path) -> Path:
    """The newest run whose quantisations are those of the bundle."""
    wanted = (manifest.get("lineage") or {}).get("quantize")
    records = sorted(runs_dir.glob("*/records.json"), key=lambda p: p.parent.name, reverse=True)
    for path in records:
        made = RunFiles(path.parent).record("quantize").get("sha256")
        if wanted and made == wanted and not path.parent.is_symlink():
            return path.parent
    raise ParityInputError(
        f"no run in {runs_dir} has the quantisations {str(wanted)[:12]} that this bundle was made "
        "from; give --runs DIR, the folder of runs it comes from"
    )


def _bundled(manifest: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """The bundle's own files, each with the hash its manifest promises."""
    files = {}
    for name, facts in manifest["models"].items():
        path = folder / facts["file"]
        if not path.is_file() or hash_file(path) != facts["sha256"]:
            raise ParityInputError(
                f"{path} is missing or not the file its manifest names; check the bundle: "
                f"rl-pipeline verify {folder}"
            )
        files[name] = path
    return files


def compare(
    sides: Sides, *, threads: int, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The figures of `quantize.side_by_side.measure`, and the sentence that lays a loss at a door.

    Raises:
        ParityInputError: the run has no quantised file.
    """
    from tasks.models.load import load_tokenizer

    if not sides.files:
        raise ParityInputError(f"{sides.title} has no quantised file; run: rl-pipeline run")

    def tell(gguf: Path) -> None:
        if progress is not None:
            progress(f"{gguf.stem.lstrip('.')} answers {len(sides.rows)} problems")

    play = greedy_transcripts(
        sides.model, sides.rows, parallel=sides.parallel, threads=threads, progress=tell
    )
    remembered: dict[Path, list[Played]] = {}

    def play_once(gguf: Path, places: Any) -> list[Played]:
        if gguf not in remembered:
            remembered[gguf] = play(gguf, places)
        return remembered[gguf]

    tokenizer = load_tokenizer(sides.model.tokenizer)
    places = range(len(sides.rows))
    figures = measure(
        sides.f16,
        sides.files,
        play_once,
        places,
        lambda ids: [str(tokenizer.decode([i])) for i in ids],
        threads=threads,
    )
    right = {name: _right(remembered[path]) for name, path in sides.files.items()}
    base = _right(remembered[sides.f16])
    rl = None
    if sides.snapshot is not None:
        with _as_gguf(sides.snapshot) as gguf:
            rl = _delta(base, _right(play(gguf, places)))
    deltas = {name: _delta(values, base) for name, values in right.items()}
    return {
        "title": sides.title,
        "attribution": attribution(rl, deltas),
        "rl_accuracy_delta": None if rl is None else {"value": rl.value, "ci95": [rl.low, rl.high]},
        **figures,
    }


@contextmanager
def _as_gguf(folder: Path) -> Iterator[Path]:
    """An HF folder as an F16 file, gone when the block ends."""
    from quantize.convert import convert

    with TemporaryDirectory(prefix="rl-pipeline-") as temporary:
        yield convert(folder, Path(temporary) / "SFT snapshot.gguf").path


def _right(played: list[Played]) -> np.ndarray:
    return np.array([one.correct for one in played], np.float64)


def _delta(a: np.ndarray, b: np.ndarray) -> Interval:
    return paired_bootstrap(a, b, resamples=RESAMPLES, seed=0)


def write_result(figures: Mapping[str, Any], out_dir: Path) -> Path:
    """Write `side_by_side.json` and `parity.html`; returns the page.

    Raises:
        ArtifactWriteError: the disk refused.
    """
    from flows.report.side_by_side import write_page

    write_json(out_dir / RESULT, figures)
    return write_page(figures, out_dir / PAGE)
