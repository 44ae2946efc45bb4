"""Six real stages that take milliseconds, run by the real machinery in real processes.

They stand in for the slow stages only: what they write follows the contracts of
`docs/architecture.md`, and their output depends on the settings and inputs a real one depends on.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from configs.schema import PipelineConfig
from tasks.artifacts import ArtifactRecord, hash_file, hash_json, write_json
from tasks.artifacts.progress import Reporter
from tasks.stages import STAGES, StageSpec

BEHAVIOUR = "TINY_STAGES_BEHAVIOUR"
"""Environment variable: JSON `{stage: what to do}`; see `misbehave`."""


def specs() -> dict[str, StageSpec]:
    """The real table with the tiny functions in place of the real ones."""
    return {
        name: StageSpec(
            name=name,
            inputs=spec.inputs,
            slice=spec.slice,
            entry=f"tiny_stages:{name}",
            code=("tasks.artifacts.record",),
            shown=spec.shown,
        )
        for name, spec in STAGES.items()
    }


def misbehave(stage: str, out_dir: Path) -> None:
    """Do what the test asked for: raise, die, hang, or leave a grandchild in its own session."""
    todo = json.loads(os.environ.get(BEHAVIOUR, "{}")).get(stage, "")
    if todo == "raise":
        raise ValueError("gold answer 'x' in row r7 is no number")
    if todo == "die-once" and not (out_dir / "died").exists():
        (out_dir / "died").write_text("yes")
        os.kill(os.getpid(), 9)
    if todo == "hang":
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleeper, start_new_session=True)
        write_json(out_dir / "hanging.json", {"pid": os.getpid(), "grandchild": child.pid})
        time.sleep(600)


def _finish(out_dir: Path, kind: str, name: str, value: object, **meta: object) -> ArtifactRecord:
    write_json(out_dir / name, value)
    sha256 = hash_file(out_dir / name)
    return ArtifactRecord(kind=kind, uri=out_dir.as_posix(), sha256=sha256, meta=meta)


def _sources(inputs: dict[str, ArtifactRecord]) -> dict[str, str]:
    return {name: record.sha256 for name, record in inputs.items()}


def data(config: PipelineConfig, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """Rows that depend on the source and the seed."""
    misbehave("data", out_dir)
    report.metrics(0, {"gx/import_s": 0.25})
    write_json(out_dir / "gate.json", {"verdicts": [{"seconds": 0.5}], "as_read": []})
    rows = {"seed": config.data.seed, "source": config.data.source.model_dump(mode="json")}
    report.progress(1, 1, "rows written")
    return _finish(out_dir, "dataset", "train.json", rows)


def sft(config: PipelineConfig, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """Weights that depend on data, model and SFT settings; three metric lines."""
    misbehave("sft", out_dir)
    for step in (1, 2, 3):
        report.metrics(step, {"sft/loss": 1.0 / step})
        report.progress(step, 3, "training")
    return _finish(
        out_dir, "model", "w.json", [_sources(inputs), config.sft.steps, config.model.type]
    )


def rl(config: PipelineConfig, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """Counts to three with a checkpoint each step, and goes on from it."""
    checkpoint = out_dir / "checkpoints" / "step.json"
    done = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0
    resumes = int(done > 0)
    for step in range(done + 1, 4):
        report.metrics(step, {"rl/reward_mean": 0.25 * step, "rl/unknown": float("nan")})
        write_json(checkpoint, step)
        if step == 2:
            misbehave("rl", out_dir)
    books = {
        "earlier_wall_s": 36.0,
        "effective_samples": 10.0,
        "samples": {"trained": 10},
        "seconds": {"learner": {"train": 36.0}, "rollout": {"rollout": 36.0}},
        "usd_per_device_hour": 999.0,
    }
    write_json(out_dir / "ledger.json", books)
    facts_of_run = {"steps": 3, "samples": 24, "effective_samples": 10.0, "staleness_limit": 2}
    write_json(
        out_dir / "summary.json", {**facts_of_run, "max_staleness_seen": 1, "resumes": resumes}
    )
    settings = [config.rl.steps, config.rl.seed, list(config.tools), list(config.data.rl_bands)]
    return _finish(out_dir, "model", "w.json", [_sources(inputs), settings])


def evaluation(config, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """A verdict: accuracy up from 0.25 to 0.75 on four problems."""
    misbehave("evaluation", out_dir)
    bands = [{"band": "easy", "accuracy": 1.0, "n": 2, "ci95": [1, 1]}]
    summary = {
        "sft": {"accuracy": 0.25, "n": 4, "by_band": bands},
        "rl": {"accuracy": 0.75, "n": 4, "by_band": bands},
        "delta": {"value": 0.5, "ci95": [0.25, 0.75], "n": 4},
        "gate": {"passed": True, "reasons": [], "checks": []},
        "of": [_sources(inputs), config.evaluation.model_dump(mode="json")],
    }
    return _finish(out_dir, "evaluation", "summary.json", summary)


def quantize(config, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """A parity table of one quantisation."""
    misbehave("quantize", out_dir)
    facts_q8 = {"size_bytes": 10, "bits_per_weight": 8.5, "kld_mean": 0.001, "top1": 0.99}
    verdict = {"ppl_ratio": 1.0, "accuracy": 0.75, "accuracy_delta_ci95": [-0.01, 0.01]}
    q8 = {**facts_q8, **verdict, "ships": True, "why": "within the gate"}
    parity = {"quant": {"Q8_0": q8}, "of": [_sources(inputs), list(config.quantize.types)]}
    return _finish(out_dir, "quantisations", "parity.json", parity)


def package(config, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """A bundle with a manifest."""
    misbehave("package", out_dir)
    manifest = {"of": _sources(inputs), "name": config.package.name}
    (out_dir / "bundle").mkdir(exist_ok=True)
    write_json(out_dir / "bundle" / "manifest.json", manifest)
    return ArtifactRecord(
        kind="bundle", uri=out_dir.as_posix(), sha256=hash_json(manifest), meta={"signed": True}
    )
