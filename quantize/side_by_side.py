"""F16 and quantised files side by side on the same prompts: where they part, and what it cost.

Both answer greedily, with the same loop and the same tools. Then every file reads F16's own
answers, token by token, so that their distributions are compared where the contexts are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantize.divergence import paired_logits, targets
from quantize.errors import ParityError
from quantize.parity import RESAMPLES, log_softmax, token_kl
from quantize.rollouts import RolloutTokens
from tasks.artifacts.bootstrap import Interval, bootstrap_mean, paired_bootstrap

LOST, GAINED, OTHER = "lost", "gained", "other words"
MOST_POSITIONS = 256
EXAMPLES = {LOST: 6, GAINED: 6, OTHER: 3}
"""Transcripts kept of each kind, for each file."""


@dataclass(frozen=True)
class Played:
    """One greedy answer."""

    row_id: str
    band: str
    gold: str
    correct: bool
    outcome: str
    extracted: str | None
    messages: tuple[Mapping[str, str], ...]
    tokens: RolloutTokens

    @property
    def sampled(self) -> tuple[int, ...]:
        """The ids the model chose, of all turns."""
        pairs = zip(self.tokens.token_ids, self.tokens.action_mask, strict=True)
        return tuple(token for token, acted in pairs if acted)


Play = Callable[[Path, Sequence[int]], list[Played]]
"""(GGUF file, places in the held-out order) → its greedy answer to each of those problems."""
TokenTexts = Callable[[Sequence[int]], list[str]]
"""Ids → the text of each, for people."""


@dataclass(frozen=True)
class Reading:
    """How one file reads one of F16's answers: a figure for each of its N sampled tokens."""

    kl: np.ndarray
    """KL(F16‖file), nats, float64 (N,)."""
    same_top: np.ndarray
    """Whether both put the same token first, bool (N,)."""


@dataclass(frozen=True)
class Parting:
    """The first sampled token at which a file's answer is another than F16's."""

    position: int
    """Sampled tokens before it."""
    f16_token: int | None
    """None where F16's answer had ended."""
    file_token: int | None


def first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> Parting | None:
    """Where two answers part; None where they are the same to the end."""
    for position in range(max(len(ours), len(theirs))):
        mine = ours[position] if position < len(ours) else None
        other = theirs[position] if position < len(theirs) else None
        if mine != other:
            return Parting(position, mine, other)
    return None


def chosen_problems(answers: Mapping[str, np.ndarray], reference: str, limit: int) -> list[int]:
    """Problems to look at: `limit` of them spread evenly, then the first flips of every file.

    `answers` holds 0 or 1 for each problem, by file. The first `limit` places returned are the even
    spread; whatever is said about how often something happens must rest on these alone.
    """
    base = answers[reference]
    spread = np.unique(np.linspace(0, len(base) - 1, min(limit, len(base))).round().astype(int))
    places = list(map(int, spread))
    for name, given in answers.items():
        if name == reference:
            continue
        for kind, sign in ((LOST, -1), (GAINED, 1)):
            flipped = np.flatnonzero(np.sign(given - base) == sign)[: EXAMPLES[kind]]
            places += [int(i) for i in flipped if int(i) not in places]
    return places


def read_aloud(
    f16: Path, files: Mapping[str, Path], played: Sequence[Played], threads: int
) -> dict[str, list[Reading]]:
    """Every file reads F16's answers; by name, in the order of `played`.

    Raises:
        ParityError: an answer without a sampled token.
    """
    rollouts = [one.tokens for one in played]
    if any(not len(targets(rollout)) for rollout in rollouts):
        raise ParityError("an answer has no sampled token that something predicts")
    found: dict[str, list[Reading]] = {name: [] for name in files}
    for p_logits, others in paired_logits(f16, files, rollouts, threads):
        logp = log_softmax(p_logits)
        for name, q_logits in others.items():
            logq = log_softmax(q_logits)
            same = logp.argmax(axis=-1) == logq.argmax(axis=-1)
            found[name].append(Reading(token_kl(logp, logq), same))
    return found


def kl_by_position(readings: Sequence[Reading]) -> list[dict[str, float]]:
    """Mean KL at the 1st, 2nd, … sampled token, over the answers that are long enough.

    Each entry: `position` from 0, `answers` it rests on, `kl` and its 95 % interval `low`, `high`.
    """
    longest = min(MOST_POSITIONS, max(len(r.kl) for r in readings))
    curve = []
    for position in range(longest):
        values = np.array([r.kl[position] for r in readings if len(r.kl) > position])
        mean = bootstrap_mean(values, resamples=500, seed=position)
        curve.append(
            {
                "position": position,
                "answers": len(values),
                "kl": mean.value,
                "low": mean.low,
                "high": mean.high,
            }
        )
    return curve


def still_the_same(partings: Sequence[Parting | None], longest: int) -> list[dict[str, float]]:
    """Share of answers still the same after k sampled tokens, k = 0 … longest."""
    lengths = [p.position if p is not None else longest + 1 for p in partings]
    return [
        {"tokens": k, "share": sum(n >= k for n in lengths) / len(lengths)}
        for k in range(min(longest, MOST_POSITIONS) + 1)
    ]


def measure(
    f16: Path,
    files: Mapping[str, Path],
    play: Play,
    problems: Sequence[int],
    token_texts: TokenTexts,
    *,
    counted: int | None = None,
    threads: int = 1,
) -> dict[str, Any]:
    """Everything the page shows, as plain JSON data.

    `problems` are places in the held-out order. Shares and curves rest on the first `counted` of
    them (None: all); the others were picked for their flips and only give transcripts.

    Raises:
        ParityError: no problem, or files that answered other problems.
    """
    if not problems:
        raise ParityError("no problem to compare F16 and its quantisations on")
    base = play(f16, problems)
    answered = {name: play(path, problems) for name, path in files.items()}
    for name, other in answered.items():
        if [p.row_id for p in other] != [p.row_id for p in base]:
            raise ParityError(f"{name} answered other problems than F16")
    readings = read_aloud(f16, files, base, threads)
    count = len(base) if counted is None else min(counted, len(base))
    return {
        "problems": count,
        "f16_accuracy": float(np.mean([p.correct for p in base[:count]])),
        "files": {
            name: {
                **_figures(base[:count], other[:count], readings[name][:count]),
                "examples": _examples(base, other, readings[name], token_texts),
            }
            for name, other in answered.items()
        },
    }


def _figures(
    base: Sequence[Played], other: Sequence[Played], readings: Sequence[Reading]
) -> dict[str, Any]:
    """Shares and curves of one file."""
    partings = [first_divergence(a.sampled, b.sampled) for a, b in zip(base, other, strict=True)]
    parted = [p.position for p in partings if p is not None]
    longest = max(len(a.sampled) for a in base)
    right, theirs = (np.array([p.correct for p in side], np.float64) for side in (base, other))
    tokens = np.array([len(r.kl) for r in readings], np.float64)
    kl = np.array([r.kl.mean() for r in readings])
    return {
        "accuracy": float(theirs.mean()),
        "accuracy_delta": _interval(paired_bootstrap(theirs, right, resamples=RESAMPLES, seed=0)),
        "kl": _interval(bootstrap_mean(kl, weights=tokens, resamples=RESAMPLES, seed=0)),
        "lost": int(((right == 1) & (theirs == 0)).sum()),
        "gained": int(((right == 0) & (theirs == 1)).sum()),
        "identical": len(partings) - len(parted),
        "first_divergence_median": float(np.median(parted)) if parted else None,
        "still_the_same": still_the_same(partings, longest),
        "kl_by_position": kl_by_position(readings),
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "ci95": [interval.low, interval.high]}


def _examples(
    base: Sequence[Played],
    other: Sequence[Played],
    readings: Sequence[Reading],
    token_texts: TokenTexts,
) -> list[dict[str, Any]]:
    """Transcripts of flips in both directions, and of answers said in other words."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in EXAMPLES}
    for mine, theirs, reading in zip(base, other, readings, strict=True):
        parting = first_divergence(mine.sampled, theirs.sampled)
        kind = _kind(mine, theirs, parting)
        if kind is not None and len(found[kind]) < EXAMPLES[kind]:
            found[kind].append(_example(kind, mine, theirs, parting, reading, token_texts))
    return [example for kind in EXAMPLES for example in found[kind]]


def _kind(mine: Played, theirs: Played, parting: Parting | None) -> str | None:
    if mine.correct != theirs.correct:
        return LOST if mine.correct else GAINED
    return OTHER if parting is not None else None


def _example(
    kind: str,
    mine: Played,
    theirs: Played,
    parting: Parting | None,
    reading: Reading,
    token_texts: TokenTexts,
) -> dict[str, Any]:
    parted = None
    if parting is not None:
        ids = (parting.f16_token, parting.file_token)
        texts = [None if i is None else token_texts([i])[0] for i in ids]
        parted = {"position": parting.position, "f16": texts[0], "file": texts[1]}
    # the last sampled tokens of F16's answer are those the readings speak of
    shown = mine.sampled[len(mine.sampled) - len(reading.kl) :]
    return {
        "kind": kind,
        "row_id": mine.row_id,
        "band": mine.band,
        "gold": mine.gold,
        "parting": parted,
        "tokens": [
            {"text": text, "kl": float(kl), "same_top": bool(same)}
            for text, kl, same in zip(token_texts(shown), reading.kl, reading.same_top, strict=True)
        ],
        "f16": _side(mine),
        "file": _side(theirs),
    }


def _side(played: Played) -> dict[str, Any]:
    values = asdict(played)
    return {
        "correct": values["correct"],
        "outcome": values["outcome"],
        "extracted": values["extracted"],
        "messages": [dict(m) for m in played.messages],
    }
