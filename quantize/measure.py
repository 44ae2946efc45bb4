"""Measures a GGUF file: how far it lies from F16 on rollouts, and what it answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.schema.quantize import QuantGate
from quantize.divergence import against, scoring_context, targets, wanted_rows
from quantize.errors import RolloutsError
from quantize.parity import RESAMPLES, Parity, Verdict, compare, summarise, verdict
from quantize.quantise import QuantReport
from quantize.rollouts import RolloutTokens
from tasks.artifacts.bootstrap import Interval, paired_bootstrap

AnswerGreedily = Callable[[Path, int], np.ndarray]
"""(GGUF file, n) → 0 or 1 for each of the first n held-out problems, answered greedily."""

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
