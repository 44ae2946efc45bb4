"""How far one model's next-token distributions lie from another's, on tokens the policy sampled.

P is the reference (HF float32, or GGUF F16), Q the candidate. Logits come as float32 (N, V) rows,
one for each sampled token, each row predicting that token. All logarithms are natural.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from configs.schema.quantize import QuantGate
from quantize.errors import ParityError
from tasks.artifacts.bootstrap import Interval, bootstrap_mean

RESAMPLES = 2000


class SequenceParity(NamedTuple):
    """Sums over the sampled tokens of one sequence."""

    tokens: int
    kl: float
    """Σ KL(P‖Q), nats."""
    same_top: int
    """Tokens at which both put the same token first."""
    nll_p: float
    """Σ −log P(token)."""
    nll_q: float


@dataclass(frozen=True)
class Parity:
    """Q against P over all sampled tokens; intervals resample whole sequences."""

    kld: Interval
    """Mean KL(P‖Q) per token, nats."""
    top1: Interval
    """Share of tokens with the same most likely token."""
    ppl_ratio: Interval
    """Perplexity of Q divided by that of P, exp of the mean difference in −log-probability."""
    tokens: int
    sequences: int


@dataclass(frozen=True)
class Verdict:
    """Whether a file ships, and why, with numbers."""

    ships: bool
    why: str


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Row-wise log-probabilities in float64.

    Raises:
        ParityError: NaN or infinity.
    """
    wide = np.asarray(logits, np.float64)
    if not np.isfinite(wide).all():
        raise ParityError("logits hold NaN or infinity; they cannot be compared")
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def action_rows(token_ids: Sequence[int], action_mask: Sequence[bool]) -> np.ndarray:
    """Bool (T,): the positions whose logits predict a token the policy sampled.

    Token t is predicted at position t − 1; the first token is predicted by nothing.

    Raises:
        ParityError: the lengths differ.
    """
    mask = np.asarray(action_mask, bool)
    if mask.shape != (len(token_ids),):
        raise ParityError(
            f"token_ids has {len(token_ids)} entries and action_mask {mask.size}; expected as many"
        )
    rows = np.zeros_like(mask)
    rows[:-1] = mask[1:]
    return rows


def token_kl(logp: np.ndarray, logq: np.ndarray) -> np.ndarray:
    """KL(P‖Q) in nats at each of N positions, float64 (N,), from log-probabilities (N, V)."""
    kl: np.ndarray = (np.exp(logp) * (logp - logq)).sum(axis=-1)
    return np.maximum(kl, 0.0)  # rounding may leave −1e-17


def compare(p_logits: np.ndarray, q_logits: np.ndarray, targets: np.ndarray) -> SequenceParity:
    """Compare (N, V) logits at the N rows that predict `targets` (N,).

    Raises:
        ParityError: shapes differ, or a logit is not finite.
    """
    if p_logits.shape != q_logits.shape or len(targets) != len(p_logits):
        raise ParityError(
            f"logits of shape {p_logits.shape} and {q_logits.shape} for {len(targets)} tokens"
        )
    if not len(targets):
        return SequenceParity(0, 0.0, 0, 0.0, 0.0)
    logp, logq = log_softmax(p_logits), log_softmax(q_logits)
    rows = np.arange(len(targets))
    return SequenceParity(
        tokens=len(targets),
        kl=float(token_kl(logp, logq).sum()),
        same_top=int((logp.argmax(axis=-1) == logq.argmax(axis=-1)).sum()),
        nll_p=float(-logp[rows, targets].sum()),
        nll_q=float(-logq[rows, targets].sum()),
    )


def summarise(sequences: Sequence[SequenceParity], *, seed: int = 0) -> Parity:
    """Token means with 95 % intervals, resampled by sequence.

    Raises:
        ParityError: no sampled token at all.
    """
    kept = [s for s in sequences if s.tokens]
    if not kept:
        raise ParityError(
            "no sampled token to compare on; check that the rollouts' action_mask is not all False"
        )
    tokens = np.array([s.tokens for s in kept], np.float64)

    def mean(sums: Sequence[float]) -> Interval:
        return bootstrap_mean(
            np.array(sums) / tokens, weights=tokens, resamples=RESAMPLES, seed=seed
        )

    excess = mean([s.nll_q - s.nll_p for s in kept])
    return Parity(
        kld=mean([s.kl for s in kept]),
        top1=mean([s.same_top for s in kept]),
        ppl_ratio=Interval(*(math.exp(x) for x in excess)),
        tokens=int(tokens.sum()),
        sequences=len(kept),
    )


def kl_difference(
    ours: Sequence[SequenceParity], theirs: Sequence[SequenceParity], *, seed: int = 0
) -> Interval:
    """Mean KL per token of `ours` less that of `theirs`, nats; below 0, ours lies nearer.

    Paired: both sides of a drawn sequence come along, so that what is hard for both cancels.

    Raises:
        ParityError: the two do not speak of the same sequences.
    """
    if [s.tokens for s in ours] != [s.tokens for s in theirs]:
        raise ParityError(
            f"a paired difference needs the same sequences on both sides; got {len(ours)} and "
            f"{len(theirs)}, or other numbers of tokens"
        )
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.tokens]
    if not pairs:
        raise ParityError("no sampled token to compare on")
    tokens = np.array([a.tokens for a, _ in pairs], np.float64)
    excess = np.array([a.kl - b.kl for a, b in pairs]) / tokens
    return bootstrap_mean(excess, weights=tokens, resamples=RESAMPLES, seed=seed)


def f16_problem(parity: Parity, max_kld: float, min_top1: float) -> str | None:
    """Why an F16 file is not the HF model, or None."""
    problems = []
    if not parity.kld.value <= max_kld:
        problems.append(f"mean KL {parity.kld.value:.3g} nats is above max_f16_kld={max_kld:g}")
    if not parity.top1.value >= min_top1:
        problems.append(f"top-1 agreement {parity.top1.value:.4f} is below min_f16_top1={min_top1}")
    return " and ".join(problems) or None


def verdict(parity: Parity, accuracy_delta: Interval, gate: QuantGate) -> Verdict:
    """Ships only if every gate passes; accuracy is judged by its interval's lower end."""
    reasons = []
    if not accuracy_delta.low >= gate.accuracy_ci_low:
        reasons.append(
            f"accuracy may have fallen by {-100 * accuracy_delta.low:.2f} points (difference "
            f"{100 * accuracy_delta.value:+.2f}, 95 % interval {_points(accuracy_delta)}), the "
            f"gate allows {-100 * gate.accuracy_ci_low:g}"
        )
    if not parity.kld.value <= gate.max_kld:
        reasons.append(
            f"mean KL {parity.kld.value:.3g} nats per token, the gate allows {gate.max_kld:g}"
        )
    if not parity.top1.value >= gate.min_top1:
        reasons.append(
            f"top-1 agreement {100 * parity.top1.value:.2f} %, the gate asks for "
            f"{100 * gate.min_top1:g} %"
        )
    if reasons:
        return Verdict(False, "rejected: " + "; ".join(reasons))
    return Verdict(
        True,
        f"ships: accuracy {100 * accuracy_delta.value:+.2f} points, 95 % interval "
        f"{_points(accuracy_delta)}; mean KL {parity.kld.value:.3g} nats; top-1 agreement "
        f"{100 * parity.top1.value:.2f} %",
    )


def _points(interval: Interval) -> str:
    return f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f}"


def attribution(rl_delta: Interval | None, quant_deltas: Mapping[str, Interval]) -> str:
    """One sentence: where accuracy went, from the snapshot over RL to each quantisation.

    `rl_delta` is policy minus snapshot, both as F16 files; `quant_deltas` quantisation minus F16.
    A loss is claimed only where the whole interval lies below zero.
    """
    lost = [t for t, delta in quant_deltas.items() if delta.high < 0]
    unclear = [t for t, delta in quant_deltas.items() if delta.low < 0 <= delta.high]
    worst = min(quant_deltas, key=lambda t: quant_deltas[t].value, default=None)
    figures = []
    if rl_delta is None:
        rl_part = "what RL did to accuracy was not measured"
    else:
        figures.append(f"RL {100 * rl_delta.value:+.2f} points ({_points(rl_delta)})")
        rl_part = (
            "RL lost accuracy"
            if rl_delta.high < 0
            else "RL gained accuracy"
            if rl_delta.low > 0
            else "RL moved accuracy by no more than chance"
        )
    if worst is not None:
        delta = quant_deltas[worst]
        figures.append(f"{worst} {100 * delta.value:+.2f} points ({_points(delta)})")
    if lost:
        quant_part = f"quantisation lost more with {', '.join(lost)}"
        if rl_delta is None or rl_delta.high >= 0:
            quant_part = f"the loss with {', '.join(lost)} comes from quantisation"
    elif unclear:
        quant_part = "no quantisation shows a loss beyond chance"
    else:
        quant_part = "no quantisation lost accuracy"
    return f"{rl_part}, and {quant_part}: {', '.join(figures)}, 95 % paired intervals."
