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
from tasks.artifacts import ArtifactRecord, hash_file, write_json, write_jsonl
from tasks.artifacts.progress import Reporter
from tasks.data.drop_folder import read_lines
from tasks.stages import BESIDE, STAGES, StageSpec
from tests.small_releases import small_rows, write_bundle

BEHAVIOUR = "TINY_STAGES_BEHAVIOUR"
"""Environment variable: JSON `{stage: what to do}`; see `misbehave`."""
BEHAVIOUR_FILE = "tiny_behaviour.json"
"""The same in a file of the working directory, for stages under a worker that runs already."""
GO_FILE = "tiny_go"
"""A stage that was told to wait goes on once this file is in the working directory."""


def specs() -> dict[str, StageSpec]:
    """The real table with the tiny functions in place of the real ones."""
    return _tiny(STAGES)


def beside_specs() -> dict[str, StageSpec]:
    """The same for what runs beside the stages."""
    return _tiny(BESIDE)


def _tiny(real: dict[str, StageSpec]) -> dict[str, StageSpec]:
    return {
        name: StageSpec(
            name=name,
            inputs=spec.inputs,
            slice=spec.slice,
            entry=f"tiny_stages:{name}",
            code=("tasks.artifacts.record",),
            shown=spec.shown,
            optional=spec.optional,
        )
        for name, spec in real.items()
    }


def misbehave(stage: str, out_dir: Path) -> None:
    """Do what the test asked for: raise, die, wait, or hang with a child in its own session."""
    told = os.environ.get(BEHAVIOUR, "{}")
    if Path(BEHAVIOUR_FILE).exists():
        told = Path(BEHAVIOUR_FILE).read_text()
    todo = json.loads(told).get(stage, "")
    if todo == "raise":
        raise ValueError("gold answer 'x' in row r7 is no number")
    if todo == "die-once" and not (out_dir / "died").exists():
        (out_dir / "died").write_text("yes")
        os.kill(os.getpid(), 9)
    if todo == "wait":
        while not Path(GO_FILE).exists():
            time.sleep(0.1)
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
    gate = {"passed": True, "reasons": [], "verdicts": [{"seconds": 0.5}], "as_read": []}
    write_json(out_dir / "gate.json", gate)
    write_jsonl(out_dir / "heldout.jsonl", small_rows(8))
    dropped = read_lines(inputs["intake"]) if "intake" in inputs else []
    new = [{**json.loads(d.text), "id": d.key} for d in dropped if not d.problem]
    write_jsonl(out_dir / "train.jsonl", [*small_rows(4), *new])
    rows = {
        "seed": config.data.seed,
        "source": config.data.source.model_dump(mode="json"),
        "dropped": new,
    }
    report.progress(1, 1, "rows written")
    heldout_sha256 = hash_file(out_dir / "heldout.jsonl")
    return _finish(out_dir, "dataset", "train.json", rows, heldout_sha256=heldout_sha256)


def sft(config: PipelineConfig, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """Weights that depend on data, model and SFT settings; three metric lines."""
    misbehave("sft", out_dir)
    if "start" in inputs:
        return ArtifactRecord(kind="model", uri=out_dir.as_posix(), sha256=inputs["start"].sha256)
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
    write_json(out_dir / "policy" / "tokenizer_config.json", {})
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
    """A signed bundle whose model solves as many problems as RL took steps."""
    misbehave("package", out_dir)
    settings = json.loads((inputs["rl"].path / "w.json").read_bytes())[1]
    keys = Path(facts["runs_dir"]) / "keys"
    name = config.package.name
    bundle = out_dir / "bundle"
    sha256 = write_bundle(bundle, keys, str(settings[0]), of=_sources(inputs), name=name)
    meta = {"signed": True, "default": "Q8_0", "bundle": str(bundle)}
    return ArtifactRecord(kind="bundle", uri=out_dir.as_posix(), sha256=sha256, meta=meta)


def challenge(config, inputs, out_dir: Path, report: Reporter, facts) -> ArtifactRecord:
    """The real comparison of two models that solve their first so many problems."""
    misbehave("challenge", out_dir)
    from tasks.evaluation.challenge import run

    return run(
        inputs,
        out_dir,
        report,
        problems=config.promotion.problems,
        resamples=config.evaluation.bootstrap_resamples,
        answer=_answers,
    )


def _answers(model, rows, progress):
    from tasks.evaluation.types import AnswerRecord
    from tasks.rewards.verdict import Outcome

    solved = int(model.gguf.read_text().split()[-1])
    return [
        AnswerRecord(
            row.id, 0, row.band, 0, Outcome.CORRECT if i < solved else Outcome.WRONG, row.answer,
            row.answer, row.answer, "", 3, 1, False, 0, 0,
            ({"role": "user", "content": row.prompt}, {"role": "assistant", "content": "<b>`4`"}),
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
