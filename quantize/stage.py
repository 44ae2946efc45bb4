"""HF float32 → GGUF F16 → importance matrix → each quantisation, gated and judged at every step."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema.quantize import QuantizeConfig, QuantType
from quantize.architecture import read_shape
from quantize.convert import ConversionReport, convert
from quantize.divergence import against, scoring_context, targets, wanted_rows
from quantize.errors import ParityGateError, RolloutsError
from quantize.imatrix import collect, write_imatrix
from quantize.parity import (
    RESAMPLES,
    Parity,
    attribution,
    compare,
    f16_problem,
    summarise,
    verdict,
)
from quantize.quantise import QuantReport, describe, quantise
from quantize.rollouts import IMATRIX, PARITY, RolloutTokens, read_rollouts, take
from tasks.artifacts.atomic import write_json
from tasks.artifacts.bootstrap import Interval, bootstrap_mean, paired_bootstrap
from tasks.artifacts.content_hash import hash_file, hash_json
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord

logger = logging.getLogger(__name__)

AnswerGreedily = Callable[[Path, int], np.ndarray]
"""(GGUF file, n) → 0 or 1 for each of the first n held-out problems, answered greedily."""

F16 = "F16"


def run(
    config: QuantizeConfig,
    inputs: Mapping[str, ArtifactRecord],
    out_dir: Path,
    report: Reporter,
    *,
    answer_greedily: AnswerGreedily,
    threads: int = 1,
) -> ArtifactRecord:
    """Make and judge every quantisation of `inputs["rl"]`; writes GGUF files and `parity.json`.

    With `inputs["sft"]` the snapshot answers the same problems, so that a loss can be laid at the
    right door. A rejected file stays in `out_dir` and says so in `parity.json`.

    Raises:
        ParityGateError: the F16 file is not the HF model.
        QuantizeError: whatever else went wrong, by name.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    policy_dir = inputs["rl"].path / "policy"
    steps = _Steps(report, 5 + 2 * len(config.types))
    context_length = int(read_shape(policy_dir).kv["context_length"])
    rollouts = read_rollouts(inputs["rl"].path / "rollouts.jsonl")
    parity_set = take(rollouts, PARITY, config.parity_rollouts, context_length)
    imatrix_set = take(rollouts, IMATRIX, config.imatrix_rollouts, context_length)

    steps.next("convert to GGUF F16")
    conversion = convert(policy_dir, out_dir / "F16.gguf")
    steps.next("compare HF float32 with GGUF F16")
    f16_parity = _hf_against_f16(policy_dir, conversion.path, parity_set, threads)
    _gate_f16(f16_parity, config)
    steps.next("importance matrix from the policy's rollouts")
    imatrix = out_dir / "imatrix.gguf"
    matrix = collect(policy_dir, [r.token_ids for r in imatrix_set])
    write_imatrix(matrix, imatrix, "policy rollouts")
    reports = _quantise_all(config.types, conversion.path, imatrix, steps, threads)
    paths = {quant_type: quant.path for quant_type, quant in reports.items()}
    scored = against(conversion.path, paths, parity_set, threads)
    parities = {quant_type: summarise(sequences) for quant_type, sequences in scored.items()}

    answers = _answer_all(answer_greedily, out_dir, config, steps)
    steps.next("answer held-out problems with the snapshot")
    snapshot = _snapshot_answers(inputs, out_dir, answer_greedily, config.accuracy_problems)

    variants: dict[str, dict[str, Any]] = {
        F16: _f16_entry(conversion, f16_parity, answers[F16]),
        **{t: _entry(config, t, reports[t], parities[t], answers) for t in config.types},
    }
    summary = {
        "quant": variants,
        **_attributed(answers, snapshot),
        "conversion": _conversion(conversion, out_dir),
        "imatrix": {"rollouts": len(imatrix_set), "sha256": hash_file(imatrix)},
        "parity_rollouts": len(parity_set),
        "parity_tokens": f16_parity.tokens,
        "accuracy_problems": len(answers[F16]),
    }
    write_json(out_dir / "parity.json", summary)
    steps.finish()
    return _record(out_dir, [F16, *config.types], variants)


class _Steps:
    """Counts the stage's steps for `progress.json`."""

    def __init__(self, report: Reporter, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def next(self, message: str) -> None:
        """Say what begins now."""
        logger.info("%s", message)
        self._report.progress(self._done, self._total, message)
        self._done += 1

    def finish(self) -> None:
        """Say that all is done."""
        self._report.progress(self._total, self._total, "done")


def _quantise_all(
    types: Sequence[QuantType], f16: Path, imatrix: Path, steps: _Steps, threads: int
) -> dict[QuantType, QuantReport]:
    """Every quantisation, beside the F16 file."""
    reports: dict[QuantType, QuantReport] = {}
    for quant_type in types:
        steps.next(f"quantise to {quant_type}")
        out = f16.with_name(f"{quant_type}.gguf")
        reports[quant_type] = quantise(f16, out, quant_type, imatrix, threads=threads)
    return reports


def _gate_f16(parity: Parity, config: QuantizeConfig) -> None:
    problem = f16_problem(parity, config.max_f16_kld, config.min_f16_top1)
    if problem is not None:
        raise ParityGateError(
            f"the GGUF F16 file is not the HF model: {problem} ({parity.tokens} tokens); nothing "
            "made from it could be trusted, so no quantisation is made"
        )


def _hf_against_f16(
    policy_dir: Path, gguf: Path, rollouts: Sequence[RolloutTokens], threads: int
) -> Parity:
    """HF float32 logits against the F16 file's, one sequence in memory at a time."""
    ids = [r.token_ids for r in rollouts]
    wanted = wanted_rows(rollouts)
    with scoring_context(gguf, rollouts, threads) as context:
        pairs = zip(
            _hf_logits(policy_dir, rollouts), context.logits_of(ids, wanted), rollouts, strict=True
        )
        return summarise([compare(p, q, targets(r)) for p, q, r in pairs])


def _hf_logits(policy_dir: Path, rollouts: Sequence[RolloutTokens]) -> Iterator[np.ndarray]:
    """Float32 logits at the rows that predict sampled tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(policy_dir), dtype=torch.float32, use_safetensors=True, local_files_only=True
    ).eval()
    for rollout, rows in zip(rollouts, wanted_rows(rollouts), strict=True):
        with torch.inference_mode():
            hidden = model.model(
                input_ids=torch.tensor([list(rollout.token_ids)]), use_cache=False
            ).last_hidden_state[0]
            logits = model.lm_head(hidden[torch.from_numpy(rows)])
        yield logits.float().numpy()


def _answer_all(
    answer_greedily: AnswerGreedily, out_dir: Path, config: QuantizeConfig, steps: _Steps
) -> dict[str, np.ndarray]:
    """0 or 1 for each held-out problem, of F16 and every quantisation."""
    answers: dict[str, np.ndarray] = {}
    for name in (F16, *config.types):
        steps.next(f"answer held-out problems with {name}")
        answers[name] = _answer(answer_greedily, out_dir / f"{name}.gguf", config.accuracy_problems)
    return answers


def _answer(answer_greedily: AnswerGreedily, gguf: Path, problems: int) -> np.ndarray:
    scores = np.asarray(answer_greedily(gguf, problems), np.float64)
    if scores.ndim != 1 or not scores.size or not np.isin(scores, (0.0, 1.0)).all():
        raise RolloutsError(
            f"answers of {gguf.name} have shape {scores.shape}; expected 0 or 1 for each problem"
        )
    return scores


def _snapshot_answers(
    inputs: Mapping[str, ArtifactRecord],
    out_dir: Path,
    answer_greedily: AnswerGreedily,
    problems: int,
) -> np.ndarray | None:
    """What the SFT snapshot answers through the same engine; its file is not kept."""
    if "sft" not in inputs:
        return None
    path = out_dir / ".snapshot-F16.gguf"
    try:
        convert(inputs["sft"].path / "snapshot", path)
        return _answer(answer_greedily, path, problems)
    finally:
        path.unlink(missing_ok=True)


def _paired(a: np.ndarray, b: np.ndarray) -> Interval:
    return paired_bootstrap(a, b, resamples=RESAMPLES, seed=0)


def _attributed(answers: Mapping[str, np.ndarray], snapshot: np.ndarray | None) -> dict[str, Any]:
    """What RL did to accuracy, and the sentence that lays a loss at RL's or quantisation's door."""
    rl_delta = None if snapshot is None else _paired(answers[F16], snapshot)
    deltas = {name: _paired(a, answers[F16]) for name, a in answers.items() if name != F16}
    return {
        "attribution": attribution(rl_delta, deltas),
        "rl_accuracy_delta": None if rl_delta is None else _interval(rl_delta),
        "snapshot_accuracy": None if snapshot is None else float(snapshot.mean()),
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "ci95": [interval.low, interval.high]}


def _measured(parity: Parity, answers: np.ndarray) -> dict[str, Any]:
    accuracy = bootstrap_mean(answers, resamples=RESAMPLES, seed=0)
    return {
        "kld_mean": parity.kld.value,
        "kld_mean_ci95": [parity.kld.low, parity.kld.high],
        "top1": parity.top1.value,
        "top1_ci95": [parity.top1.low, parity.top1.high],
        "ppl_ratio": parity.ppl_ratio.value,
        "ppl_ratio_ci95": [parity.ppl_ratio.low, parity.ppl_ratio.high],
        "accuracy": accuracy.value,
        "accuracy_ci95": [accuracy.low, accuracy.high],
    }


def _f16_entry(conversion: ConversionReport, parity: Parity, answers: np.ndarray) -> dict[str, Any]:
    """F16 against HF float32; its accuracy is the reference, so its difference is nought."""
    return {
        **_file(describe(conversion.path)),
        **_measured(parity, answers),
        "accuracy_delta": 0.0,
        "accuracy_delta_ci95": [0.0, 0.0],
        "ships": True,
        "why": (
            f"ships: mean KL to the HF model {parity.kld.value:.3g} nats, top-1 agreement "
            f"{100 * parity.top1.value:.2f} %"
        ),
    }


def _entry(
    config: QuantizeConfig,
    quant_type: QuantType,
    quant: QuantReport,
    parity: Parity,
    answers: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    delta = _paired(answers[quant_type], answers[F16])
    judged = verdict(parity, delta, config.gates[quant_type])
    return {
        **_file(quant),
        **_measured(parity, answers[quant_type]),
        "accuracy_delta": delta.value,
        "accuracy_delta_ci95": [delta.low, delta.high],
        "ships": judged.ships,
        "why": judged.why,
    }


def _file(quant: QuantReport) -> dict[str, Any]:
    return {
        "file": quant.path.name,
        "sha256": quant.sha256,
        "size_bytes": quant.size_bytes,
        "bits_per_weight": quant.bits_per_weight,
        "matrix_bits_per_weight": quant.matrix_bits_per_weight,
        "tensor_types": quant.tensor_types,
        "fallbacks": list(quant.fallbacks),
        "without_imatrix": list(quant.uncovered),
    }


def _conversion(conversion: ConversionReport, out_dir: Path) -> dict[str, Any]:
    values = dataclasses.asdict(conversion)
    values["path"] = conversion.path.relative_to(out_dir).as_posix()
    values["kept_f32"] = list(conversion.kept_f32)
    return values


def _record(
    out_dir: Path, names: Sequence[str], variants: Mapping[str, Mapping[str, Any]]
) -> ArtifactRecord:
    """The record; its hash covers the files other stages read, not logs and progress."""
    files = [*(f"{name}.gguf" for name in names), "imatrix.gguf", "parity.json"]
    return ArtifactRecord(
        kind="quantisations",
        uri=out_dir.as_posix(),
        sha256=hash_json({file: hash_file(out_dir / file) for file in files}),
        meta={"ships": {name: bool(variants[name]["ships"]) for name in names}, "files": files},
    )
