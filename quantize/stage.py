"""HF float32 → GGUF F16 → importance matrix → each quantisation, gated and judged at every step."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema.quantize import QuantizeConfig, QuantType
from quantize.architecture import read_shape
from quantize.convert import ConversionReport, convert
from quantize.entries import F16, attributed, entry, f16_entry, with_repairs
from quantize.errors import ParityGateError
from quantize.imatrix import write_imatrix
from quantize.imatrix_compare import compare_matrices, own_matrix
from quantize.measure import AnswerGreedily, Judged, Yardstick, answers_of, convert_and_compare
from quantize.moments import collect_moments
from quantize.parity import Parity, f16_problem
from quantize.quantise import QuantReport, quantise
from quantize.repair_bench import Subject
from quantize.repair_run import Repaired, next_larger, repair
from quantize.rollouts import IMATRIX, PARITY, RolloutTokens, read_rollouts, take
from quantize.row_choice import ROW_WISE, RowChoice, quantise_by_rows
from quantize.side_by_side import Play, chosen_problems, measure
from tasks.artifacts.atomic import write_json
from tasks.artifacts.content_hash import hash_file, hash_json
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord
from tasks.models.load import load_tokenizer

logger = logging.getLogger(__name__)


class _Steps:
    """Counts the stage's steps for `progress.json`."""

    def __init__(self, report: Reporter, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def next(self, message: str) -> None:
        """Say what begins now."""
        logger.info("%s", message)
        self._report.progress(self._done, self._total, message)
        self._done += 1

    def note(self, message: str) -> None:
        """Say how a long step goes on."""
        self._report.progress(max(0, self._done - 1), self._total, message)

    def more(self, steps: int) -> None:
        """There is more to do than was known."""
        self._total += steps

    def finish(self) -> None:
        """Say that all is done."""
        self._report.progress(self._total, self._total, "done")


def run(
    config: QuantizeConfig,
    inputs: Mapping[str, ArtifactRecord],
    out_dir: Path,
    report: Reporter,
    *,
    answer_greedily: AnswerGreedily,
    play: Play | None = None,
    threads: int = 1,
) -> ArtifactRecord:
    """Make and judge every quantisation of `inputs["rl"]`; writes GGUF files and `parity.json`.

    With `inputs["sft"]` the snapshot answers the same problems, so that a loss can be laid at the
    right door. A rejected file stays in `out_dir` and says so in `parity.json`. `play` gives the
    whole answers to problems in the same order: then `side_by_side.json` is written too.

    Raises:
        ParityGateError: the F16 file is not the HF model.
        QuantizeError: whatever else went wrong, by name.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    policy_dir = inputs["rl"].path / "policy"
    steps = _Steps(report, 5 + 2 * len(config.types))
    imatrix_set, parity_set = _rollouts(config, inputs["rl"].path)
    steps.next("convert to GGUF F16, compare with HF float32")
    f16 = out_dir / "F16.gguf"
    conversion, f16_parity = convert_and_compare(policy_dir, f16, parity_set, threads)
    _gate_f16(f16_parity, config)
    imatrix = _write_own_matrix(config, policy_dir, imatrix_set, out_dir, steps)
    moments = _moments(config, policy_dir, f16, imatrix_set)
    reports, choices = _quantise_all(config.types, f16, imatrix, moments, steps, threads)
    steps.next(f"answer held-out problems with {F16}")
    f16_answers = answers_of(answer_greedily, conversion.path, config.accuracy_problems)
    yardstick = Yardstick(conversion.path, parity_set, answer_greedily, f16_answers, threads)
    judged = _judge_all(config, reports, yardstick, steps)
    repairs = _repair_rejected(config, judged, yardstick, imatrix, steps)
    matrices = _matrices(config, policy_dir, reports, imatrix_set, yardstick, steps)
    made = [*judged.values(), *(r.judged for r in repairs if r.judged is not None)]
    answers = {F16: f16_answers, **{one.name: one.answers for one in made}}
    steps.next("answer held-out problems with the snapshot")
    snapshot = _snapshot_answers(inputs, out_dir, answer_greedily, len(f16_answers))

    variants = {F16: f16_entry(conversion, f16_parity, f16_answers)}
    variants |= {name: entry(one) for name, one in judged.items()}
    variants = with_repairs(variants, repairs)
    summary = {
        "quant": variants,
        **attributed(answers, snapshot),
        "conversion": _conversion(conversion, out_dir),
        "imatrix": _described(imatrix, len(imatrix_set), config, matrices, choices),
        "parity_rollouts": len(parity_set),
        "parity_tokens": f16_parity.tokens,
        "accuracy_problems": len(f16_answers),
    }
    write_json(out_dir / "parity.json", summary)
    if play is not None and config.side_by_side_problems:
        figures = _side_by_side(config, policy_dir, made, answers, play, steps, threads)
        write_json(out_dir / "side_by_side.json", {**figures, **attributed(answers, snapshot)})
    steps.finish()
    return _record(out_dir, variants)


def _rollouts(
    config: QuantizeConfig, rl_dir: Path
) -> tuple[list[RolloutTokens], list[RolloutTokens]]:
    """The policy's own rollouts for the importance matrix, and other ones for parity."""
    context_length = int(read_shape(rl_dir / "policy").kv["context_length"])
    rollouts = read_rollouts(rl_dir / "rollouts.jsonl")
    return (
        take(rollouts, IMATRIX, config.imatrix_rollouts, context_length),
        take(rollouts, PARITY, config.parity_rollouts, context_length),
    )


def _write_own_matrix(
    config: QuantizeConfig,
    policy_dir: Path,
    rollouts: Sequence[RolloutTokens],
    out_dir: Path,
    steps: _Steps,
) -> Path:
    """The file with the importance matrix of the policy's own rollouts."""
    steps.next("importance matrix from the policy's rollouts")
    path = out_dir / "imatrix.gguf"
    write_imatrix(own_matrix(policy_dir, rollouts, config.imatrix_weights), path, "policy rollouts")
    return path


def _described(
    imatrix: Path,
    rollouts: int,
    config: QuantizeConfig,
    comparison: dict[str, Any] | None,
    choices: Mapping[str, RowChoice],
) -> dict[str, Any]:
    """What the matrix was made of, what rows were chosen by it, and how it compares where asked."""
    return {
        "rollouts": rollouts,
        "weights": config.imatrix_weights,
        "sha256": hash_file(imatrix),
        "comparison": comparison,
        "row_choice": {name: dataclasses.asdict(choice) for name, choice in choices.items()},
    }


def _matrices(
    config: QuantizeConfig,
    policy_dir: Path,
    reports: Mapping[QuantType, QuantReport],
    imatrix_set: Sequence[RolloutTokens],
    yardstick: Yardstick,
    steps: _Steps,
) -> dict[str, Any] | None:
    """The own matrix against others, where the config asks for it."""
    if not config.imatrix_compare:
        return None
    steps.more(1)
    steps.next("compare with a matrix of generic text, and with none")
    return compare_matrices(
        policy_dir,
        yardstick.f16,
        {quant_type: quant.path for quant_type, quant in reports.items()},
        sum(len(r.token_ids) for r in imatrix_set),
        yardstick.rollouts,
        context_length=int(read_shape(policy_dir).kv["context_length"]),
        threads=yardstick.threads,
    )


def _side_by_side(
    config: QuantizeConfig,
    policy_dir: Path,
    made: Sequence[Judged],
    answers: Mapping[str, np.ndarray],
    play: Play,
    steps: _Steps,
    threads: int,
) -> dict[str, Any]:
    """An even spread of problems, and some whose answers flipped, with everything that was said."""
    steps.more(1)
    steps.next("put answers side by side")
    files = {one.name: one.report.path for one in made}
    tokenizer = load_tokenizer(policy_dir)
    spread = min(config.side_by_side_problems, len(answers[F16]))
    return measure(
        next(iter(files.values())).with_name(f"{F16}.gguf"),
        files,
        play,
        chosen_problems(answers, F16, spread),
        lambda ids: [str(tokenizer.decode([i])) for i in ids],
        counted=spread,
        threads=threads,
    )


def _moments(
    config: QuantizeConfig, policy_dir: Path, f16: Path, rollouts: Sequence[RolloutTokens]
) -> dict[str, np.ndarray] | None:
    """What choosing rows goes by; None where the model is too large for it, or no type uses it."""
    from gguf import GGUFReader

    weights = sum(int(t.n_elements) for t in GGUFReader(f16).tensors)
    if weights >= config.row_choice_below or not ROW_WISE.intersection(config.types):
        return None
    return collect_moments(policy_dir, [r.token_ids for r in rollouts])


def _quantise_all(
    types: Sequence[QuantType],
    f16: Path,
    imatrix: Path,
    moments: Mapping[str, np.ndarray] | None,
    steps: _Steps,
    threads: int,
) -> tuple[dict[QuantType, QuantReport], dict[str, RowChoice]]:
    """Every quantisation, beside the F16 file; and what was chosen where rows were."""
    reports: dict[QuantType, QuantReport] = {}
    choices: dict[str, RowChoice] = {}
    for quant_type in types:
        steps.next(f"quantise to {quant_type}")
        out = f16.with_name(f"{quant_type}.gguf")
        if moments is not None and quant_type in ROW_WISE:
            reports[quant_type], choices[quant_type] = quantise_by_rows(
                f16, out, quant_type, imatrix, moments, threads=threads
            )
        else:
            reports[quant_type] = quantise(f16, out, quant_type, imatrix, threads=threads)
    return reports, choices


def _judge_all(
    config: QuantizeConfig,
    reports: Mapping[QuantType, QuantReport],
    yardstick: Yardstick,
    steps: _Steps,
) -> dict[QuantType, Judged]:
    """Every quantisation against its gate."""
    parities = yardstick.parities({name: report.path for name, report in reports.items()})
    judged: dict[QuantType, Judged] = {}
    for quant_type, report in reports.items():
        steps.next(f"answer held-out problems with {quant_type}")
        gate = config.gates[quant_type]
        judged[quant_type] = yardstick.judge(report, quant_type, parities[quant_type], gate)
    return judged


def _repair_rejected(
    config: QuantizeConfig,
    judged: Mapping[QuantType, Judged],
    yardstick: Yardstick,
    imatrix: Path,
    steps: _Steps,
) -> list[Repaired]:
    """What became of every rejected quantisation; nothing where repair is off."""
    rejected = [t for t, one in judged.items() if not one.verdict.ships]
    if not config.repair.enabled or not rejected:
        return []
    steps.more(len(rejected))
    repairs = []
    for quant_type in rejected:
        steps.next(f"repair {quant_type}")
        file = judged[quant_type].report.path
        subject = Subject(yardstick.f16, imatrix, file, quant_type, yardstick.threads)
        sizes = {one.name: one.report.size_bytes for one in judged.values()}
        ceiling = next_larger(subject, sizes)
        gate = config.gates[quant_type]
        repairs.append(repair(subject, yardstick, gate, ceiling, config.repair, steps.note))
    return repairs


def _gate_f16(parity: Parity, config: QuantizeConfig) -> None:
    problem = f16_problem(parity, config.max_f16_kld, config.min_f16_top1)
    if problem is not None:
        raise ParityGateError(
            f"the GGUF F16 file is not the HF model: {problem} ({parity.tokens} tokens); nothing "
            "made from it could be trusted, so no quantisation is made"
        )


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
        return answers_of(answer_greedily, path, problems)
    finally:
        path.unlink(missing_ok=True)


def _conversion(conversion: ConversionReport, out_dir: Path) -> dict[str, Any]:
    values = dataclasses.asdict(conversion)
    values["path"] = conversion.path.relative_to(out_dir).as_posix()
    values["kept_wide"] = list(conversion.kept_wide)
    return values


def _record(out_dir: Path, variants: Mapping[str, Mapping[str, Any]]) -> ArtifactRecord:
    """The record; its hash covers the files other stages read, not logs and progress."""
    files = [*(variants[name]["file"] for name in variants), "imatrix.gguf", "parity.json"]
    return ArtifactRecord(
        kind="quantisations",
        uri=out_dir.as_posix(),
        sha256=hash_json({file: hash_file(out_dir / file) for file in files}),
        meta={"ships": {name: bool(variants[name]["ships"]) for name in variants}, "files": files},
    )
