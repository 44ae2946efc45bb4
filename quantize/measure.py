"""Measures a GGUF file: how far it lies from F16 on rollouts, and what it answers."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema.quantize import QuantGate
from quantize.convert import ConversionReport, convert
from quantize.divergence import against, scoring_context, targets, wanted_rows
from quantize.errors import ParityError, RolloutsError
from quantize.imatrix import load_float, matrix_names
from quantize.parity import RESAMPLES, Parity, Verdict, compare, summarise, verdict
from quantize.quantise import QuantReport
from quantize.rollouts import RolloutTokens
from tasks.artifacts.bootstrap import Interval, paired_bootstrap
from tasks.sampling.errors import NonFiniteLogitsError

logger = logging.getLogger(__name__)

AnswerGreedily = Callable[[Path, int], np.ndarray]
"""(GGUF file, n) → 0 or 1 for each of the first n held-out problems, answered greedily."""

F16_MAX = 65504.0
F16_MARGIN = 0.25
"""Inputs beyond this share of the largest float16 are wide too: other prompts may go further."""
NO_DIFFERENCE = Interval(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Judged:
    """One quantisation with everything its gate looks at."""

    name: str
    report: QuantReport
    parity: Parity
    answers: np.ndarray
    """0 or 1 for each held-out problem."""
    delta: Interval
    """Accuracy minus F16's, paired."""
    verdict: Verdict


@dataclass(frozen=True)
class Yardstick:
    """What every file is held against: F16, the rollouts, and F16's own answers."""

    f16: Path
    rollouts: Sequence[RolloutTokens]
    answer_greedily: AnswerGreedily
    f16_answers: np.ndarray
    threads: int

    def parities(self, files: Mapping[str, Path]) -> dict[str, Parity]:
        """Every file against F16, in one pass."""
        scored = against(self.f16, files, self.rollouts, self.threads)
        return {name: summarise(sequences) for name, sequences in scored.items()}

    def answers(self, gguf: Path) -> np.ndarray:
        """0 or 1 for each held-out problem."""
        return answers_of(self.answer_greedily, gguf, len(self.f16_answers))

    def delta(self, answers: np.ndarray) -> Interval:
        """Accuracy minus F16's with its paired interval."""
        return paired(answers, self.f16_answers)

    def judge(self, report: QuantReport, name: str, parity: Parity, gate: QuantGate) -> Judged:
        """Answer the held-out problems with a file whose parity is known, and judge it."""
        answers = self.answers(report.path)
        delta = self.delta(answers)
        return Judged(name, report, parity, answers, delta, verdict(parity, delta, gate))


def paired(a: np.ndarray, b: np.ndarray) -> Interval:
    """mean(a) − mean(b) over the same problems."""
    return paired_bootstrap(a, b, resamples=RESAMPLES, seed=0)


def answers_of(answer_greedily: AnswerGreedily, gguf: Path, problems: int) -> np.ndarray:
    """0 or 1 for each held-out problem.

    Raises:
        RolloutsError: the answers are anything else.
    """
    scores = np.asarray(answer_greedily(gguf, problems), np.float64)
    if scores.ndim != 1 or not scores.size or not np.isin(scores, (0.0, 1.0)).all():
        raise RolloutsError(
            f"answers of {gguf.name} have shape {scores.shape}; expected 0 or 1 for each problem"
        )
    return scores


def hf_against_f16(
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


def convert_and_compare(
    policy_dir: Path, out: Path, rollouts: Sequence[RolloutTokens], threads: int
) -> tuple[ConversionReport, Parity]:
    """Write the F16 file and hold it against the HF model.

    Where activations overflow float16 it is written anew, with their matrices wide.

    Raises:
        NonFiniteLogitsError: the file gives NaN or infinite logits, and no activation explains it.
        ParityError: the HF model itself does.
        QuantizeError: whatever converting found, by name.
    """
    try:
        conversion = convert(policy_dir, out)
        return conversion, hf_against_f16(policy_dir, out, rollouts, threads)
    except NonFiniteLogitsError:
        peaks = activation_peaks(policy_dir, [r.token_ids for r in rollouts])
        wide = frozenset(name for name, peak in peaks.items() if peak > F16_MARGIN * F16_MAX)
        if not wide:
            raise
        named = ", ".join(f"{name} (up to {peaks[name]:.3g})" for name in sorted(wide))
        logger.warning("inputs overflow float16, these matrices are kept as BF16: %s", named)
    conversion = convert(policy_dir, out, wide=wide)
    return conversion, hf_against_f16(policy_dir, out, rollouts, threads)


def activation_peaks(policy_dir: Path, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
    """The largest |x| that goes into each matrix, by GGUF name, over whole sequences.

    Raises:
        ParityError: an activation that is not finite in float32 either: the model itself is broken.
    """
    import torch

    names = matrix_names(policy_dir, head=True)
    model = load_float(policy_dir)
    peaks: dict[str, float] = {}
    for module_name, module in model.named_modules():
        target = names.get(f"{module_name}.weight")
        if target is not None and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(_peak_of(target, peaks))
    with torch.inference_mode():
        for ids in sequences:
            model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return peaks


def _peak_of(name: str, peaks: dict[str, float]) -> Callable[[Any, Any], None]:
    def note(_module: Any, inputs: Any) -> None:
        peak = float(inputs[0].abs().max())
        if not math.isfinite(peak):
            raise ParityError(
                f"activations before {name} are not finite in float32; this model must not ship: "
                "go back to an earlier checkpoint"
            )
        peaks[name] = max(peaks.get(name, 0.0), peak)

    return note


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
