"""The evaluation stage: snapshot and policy answer the same held-out problems.

Only this module touches models and files; what the numbers mean is in `docs/evaluation.md`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from configs.schema import PipelineConfig
from configs.schema.evaluation import EvaluationConfig
from tasks.artifacts import ArtifactRecord, hash_file, write_json, write_jsonl
from tasks.artifacts.bootstrap import paired_bootstrap
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.artifacts.progress import Reporter, read_metrics
from tasks.environments import tools_named
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Demonstration, Row
from tasks.evaluation.answers import Progress, answer_problems
from tasks.evaluation.drift import drift_signs, train_accuracy
from tasks.evaluation.gate import judge
from tasks.evaluation.metrics import correctness, evaluate
from tasks.evaluation.selection import refuse_overlap, stratified
from tasks.evaluation.types import AnswerRecord

TRAIN_ACCURACY_METRIC = "accuracy"
_Record = TypeVar("_Record", bound=BaseModel)


class PromptMismatchError(ValueError):
    """Snapshot and policy would read different tokens: their figures could not be compared."""


class PromotionRefusedError(RuntimeError):
    """The policy failed its gate and `evaluation.gate.stop_on_failure` is set."""


def run(
    config: PipelineConfig, inputs: Mapping[str, ArtifactRecord], out_dir: Path, report: Reporter
) -> ArtifactRecord:
    """Write `snapshot.jsonl`, `policy.jsonl` and `summary.json`.

    Raises:
        HeldoutOverlapError: a held-out problem was trained on.
        PromptMismatchError: the two models' tokenizers render a prompt differently.
        ArtifactCorruptError: weights no longer match their record.
        PromotionRefusedError: the gate failed and is set to stop; the files are written first.
    """
    heldout_file = inputs["data"].path / "heldout.jsonl"
    rows = _rows_to_ask(inputs["data"].path, config.evaluation.max_problems)
    folders = {
        "snapshot": _verified(inputs["sft"], "snapshot"),
        "policy": _verified(inputs["rl"], "policy"),
    }
    renderers = {name: _renderer(folder, config) for name, folder in folders.items()}
    refuse_other_prompts(rows, renderers["snapshot"], renderers["policy"])
    answers = {}
    for index, name in enumerate(folders):
        answers[name] = _answers(
            config, folders[name], rows, renderers[name], _progress(report, index, name)
        )
        write_jsonl(out_dir / f"{name}.jsonl", (a.to_json() for a in answers[name]))
    metrics_file = inputs["rl"].path / "metrics.jsonl"
    summary = summarise(
        config.evaluation, answers["snapshot"], answers["policy"], _trained_accuracy(metrics_file)
    )
    summary["heldout_sha256"] = hash_file(heldout_file)
    write_json(out_dir / "summary.json", summary)
    report.metrics(0, flat_metrics(summary))
    if config.evaluation.gate.stop_on_failure and not summary["gate"]["passed"]:
        raise PromotionRefusedError(
            f"the policy is not promoted: {'; '.join(summary['gate']['reasons'])}. Its answers "
            f"are in {out_dir}; train longer, or set evaluation.gate.stop_on_failure=false to "
            "package it as a candidate"
        )
    return ArtifactRecord(
        kind="evaluation",
        uri=out_dir.as_posix(),
        sha256=hash_file(out_dir / "summary.json"),
        meta={
            "delta": summary["delta"],
            "gate_passed": summary["gate"]["passed"],
            "heldout_sha256": summary["heldout_sha256"],
        },
    )


def summarise(
    config: EvaluationConfig,
    snapshot: Sequence[AnswerRecord],
    policy: Sequence[AnswerRecord],
    trained_accuracy: float | None,
) -> dict[str, Any]:
    """Everything of `summary.json` but the data's hash; both sides hold the same problems.

    Raises:
        PromptMismatchError: they do not.
    """
    asked = [[(a.row_id, a.sample, a.seed) for a in side] for side in (snapshot, policy)]
    if asked[0] != asked[1]:
        raise PromptMismatchError(
            "snapshot and policy answered different problems or drew with different seeds; "
            "evaluate both in one run"
        )
    sft, rl = evaluate(snapshot), evaluate(policy)
    delta = paired_bootstrap(
        correctness(policy),
        correctness(snapshot),
        resamples=config.bootstrap_resamples,
        seed=config.sampling.seed,
    )
    verdict = judge(
        config.gate, delta_ci_low=delta.low, truncated_share=float(rl["truncated_share"])
    )
    return {
        "sft": sft,
        "rl": rl,
        "delta": {"value": delta.value, "ci95": [delta.low, delta.high], "n": rl["n"]},
        "gate": verdict.to_json(),
        "drift": drift_signs(config.drift, sft, rl, trained_accuracy),
        "sampling": config.sampling.model_dump(mode="json"),
    }


def flat_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers of a summary by name, for tracking; what is unknown is left out."""
    flat = {"delta": float(summary["delta"]["value"])}
    flat["delta_ci_low"], flat["delta_ci_high"] = summary["delta"]["ci95"]
    for side in ("sft", "rl"):
        block = summary[side]
        for name in (
            "accuracy",
            "format_share",
            "stability",
            "truncated_share",
            "tool_use_share",
            "tool_error_share",
        ):
            if block[name] is not None:
                flat[f"{side}_{name}"] = float(block[name])
        flat[f"{side}_tokens_mean"] = float(block["lengths"]["mean"])
        for band in block["by_band"]:
            flat[f"{side}_accuracy_{band['band']}"] = float(band["accuracy"])
    return flat


def refuse_other_prompts(
    rows: Sequence[Row], snapshot: PromptRenderer, policy: PromptRenderer
) -> None:
    """Both renderers must give the same token ids for every problem (A18).

    Raises:
        PromptMismatchError: names the first row where they differ.
    """
    for row in rows:
        messages = [{"role": "user", "content": row.prompt}]
        first, second = snapshot.prompt_ids(messages), policy.prompt_ids(messages)
        if first != second:
            raise PromptMismatchError(
                f"row {row.id!r}: the snapshot's tokenizer gives {first[:12]}… and the policy's "
                f"{second[:12]}…; both must carry the same tokenizer and chat template"
            )


def _rows_to_ask(data: Path, limit: int) -> list[Row]:
    """Held-out rows to evaluate, proven disjoint from what was trained on."""
    heldout = _read(data / "heldout.jsonl", Row)
    demonstrations = data / "demonstrations.jsonl"
    refuse_overlap(
        heldout,
        _read(data / "train.jsonl", Row),
        _read(demonstrations, Demonstration) if demonstrations.exists() else [],
    )
    return stratified(heldout, limit)


def _read(path: Path, kind: type[_Record]) -> list[_Record]:
    """The records of a JSONL file; split at newline bytes only (A10)."""
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            records.append(kind.model_validate_json(line))
        except ValidationError as error:
            raise ArtifactCorruptError(
                f"{path}, line {number}: not a {kind.__name__} ({error.errors()[0]['msg']}); run "
                "data prep again",
                path,
            ) from error
    return records


def _verified(record: ArtifactRecord, name: str) -> Path:
    """The model folder of a stage, after its weights were hashed and compared."""
    from tasks.models.load import hash_model

    folder = record.path / name
    found = hash_model(folder)
    if found != record.sha256:
        raise ArtifactCorruptError(
            f"{folder} hashes to {found[:12]}, its record says {record.sha256[:12]}; delete the "
            "folder and run again: the stage is made anew",
            folder,
        )
    return folder


def _renderer(folder: Path, config: PipelineConfig) -> PromptRenderer:
    from tasks.models.load import load_tokenizer

    return PromptRenderer(load_tokenizer(folder), config.system_prompt)


def _answers(
    config: PipelineConfig,
    folder: Path,
    rows: Sequence[Row],
    renderer: PromptRenderer,
    progress: Progress,
) -> list[AnswerRecord]:
    """Load one model, let it answer, give its memory back."""
    from tasks.models.load import load_model
    from tasks.sampling.transformers_engine import TransformersEngine

    model = load_model(folder)
    engine = TransformersEngine(
        model,
        end_of_turn_id=renderer.end_of_turn_id,
        max_length=model.config.max_position_embeddings,
    )
    try:
        return answer_problems(
            engine,
            rows,
            renderer,
            tools_named(config.tools),
            config.evaluation.sampling,
            progress=progress,
        )
    finally:
        engine.close()


def _progress(report: Reporter, index: int, name: str) -> Progress:
    """Two models, one bar."""
    return lambda done, total: report.progress(
        index * total + done, 2 * total, f"{name}: {done} of {total} answers"
    )


def _trained_accuracy(metrics_file: Path) -> float | None:
    """Accuracy on training groups at the end of RL; None where RL did not record it."""
    if not metrics_file.exists():
        return None
    lines = read_metrics(metrics_file)
    return train_accuracy([line["values"].get(TRAIN_ACCURACY_METRIC) for line in lines])
