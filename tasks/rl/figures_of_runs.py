"""Figures read off a run: seconds of its ledger, lengths and teaching of its metrics.

Decoding is told apart from waiting, for tools or for a batch in the making, by modelling the run
itself: the decode speed is the one at which the modelled run keeps its workers busy as long as the
real one did.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from configs.schema.rl import RLConfig
from tasks.rl.figures import (
    CALIBRATION_STEPS,
    FLOOR_SEQUENCES,
    LENGTH_SIGMA,
    Figures,
    Layout,
    Teaching,
    clip_of,
    clipped_share,
    decode_speed,
    layout_of,
    run_model,
    work_of,
)
from tasks.rl.simulated_engines import DecodeSpeed
from tasks.rl.simulated_work import Times, Work

UNHINDERED = "each side is as fast beside the other as alone"
TOLERANCE = 1.01
"""Of a modelled run's busy time, over the real one's."""
MOST = 1e12
"""Seconds or samples above which a number is a mistake."""


class NoFiguresError(ValueError):
    """A run left nothing that a plan could be made from."""


def figures_of_run(folder: Path, config: PipelineConfig) -> Figures:
    """Figures of a finished RL stage, from what it left in its folder.

    Raises:
        NoFiguresError: the files are missing, or the run trained no batch.
    """
    ledger, summary = _json(folder / "ledger.json"), _json(folder / "summary.json")
    metrics = _metrics(folder / "metrics.jsonl")
    steps = int(_amount(summary.get("steps", 0), "steps"))
    fates = _amounts(ledger.get("samples"), "samples")
    made = sum(fates.values())
    seconds = _seconds(ledger)
    if not steps or not made or not metrics or not seconds.get("rollout"):
        raise NoFiguresError(
            f"{folder}: {steps} steps, {made:.0f} samples, {len(metrics)} metric lines; a plan "
            "needs a finished RL stage of at least one step: rl-pipeline forecast --probe"
        )
    layout = layout_of(config)
    publishes = max(
        1, round(_amount(summary.get("sync_proofs", steps), "sync_proofs") / layout.workers)
    )
    spent = _spent(ledger, config, publishes * layout.workers, publishes)
    written = max(1, steps // config.rl.checkpoint_every)
    work = replace(
        work_of(config, min(steps, CALIBRATION_STEPS)),
        turns_mean=_within(_mean(metrics, "turns_mean", 1.0), 1.0, config.rl.sampling.max_turns),
        filter_share=min(0.9, fates.get("filtered", 0.0) / made),
    )
    tokens = _mean(metrics, "generated_tokens_mean", _mean(metrics, "trained_tokens_mean", 1.0))
    per_turn = _within(tokens / work.turns_mean, 1.0, work.tokens.longest)
    work = replace(work, tokens=replace(work.tokens, mean=per_turn))
    times = Times(
        decode=decode_speed(config, 1.0),
        train_s=spent.train_s / (steps / config.rl.updates_per_batch),
        grade_s=spent.grade_s / made,
        publish_s=spent.publish_s,
        prove_s=spent.proof_s,
        checkpoint_s=seconds.get("checkpoint", 0.0) / written,
    )
    speed = calibrated(config, work, times, layout, spent.workers_busy_s / made)
    slots = len(ledger["seconds"])
    return Figures(
        source=f"measured by {folder.name[:12]}, {steps} steps",
        assumptions=_assumed_of_a_run(config),
        layout=layout,
        times=replace(times, decode=speed),
        work=work,
        teaching=_teaching(metrics, config.rl),
        startup_s=seconds.get("startup", 0.0) / slots,
        clip=clip_of(config.rl),
    )


@dataclass(frozen=True)
class _Spent:
    """Where a run's seconds went: of both sides in all, and of one publish and one proof."""

    train_s: float
    grade_s: float
    publish_s: float
    proof_s: float
    workers_busy_s: float
    """Worker-seconds in which anything was sampled, graded or proven."""


def _spent(
    ledger: Mapping[str, Any], config: PipelineConfig, proofs: int, publishes: int
) -> _Spent:
    """Read a ledger as the model would book it.

    Where workers sample meanwhile, the ledger's seconds of a proof hold the wait for the batch in
    the making, which the model adds by itself: then a proof, the same hash and canary, is taken to
    last no longer than a publish.
    """
    seconds = _seconds(ledger)
    if "learner" not in ledger["seconds"]:
        half_s = seconds.get("sync", 0.0) / 2
        sampling_s = seconds["rollout"] + seconds.get("grade", 0.0)
        return _Spent(
            seconds.get("train", 0.0), seconds.get("grade", 0.0),
            half_s / publishes, half_s / proofs, sampling_s + half_s,
        )  # fmt: skip
    learner, workers = _seconds(ledger, "learner"), _seconds(ledger, "rollout")
    publish_s = learner.get("sync", 0.0) / publishes
    proof_s = workers.get("sync", 0.0) / proofs
    return _Spent(
        train_s=learner.get("train", 0.0) + learner.get("grade", 0.0),
        grade_s=workers.get("grade", 0.0),
        publish_s=publish_s,
        proof_s=proof_s if config.rl.in_turns else min(proof_s, publish_s),
        workers_busy_s=sum(workers.values())
        - workers.get("idle", 0.0)
        - workers.get("startup", 0.0),
    )


def calibrated(
    config: PipelineConfig, work: Work, times: Times, layout: Layout, busy_s_per_sample: float
) -> DecodeSpeed:
    """The slowest decoding at which the modelled run's workers are no busier for a sample.

    Where tools take nearly all of that time they hide decoding, and this is its upper bound: for
    plans with slow tools, measure a run without `rl.tools.simulated_latency`.
    """
    low, high = -20.0, 5.0  # natural logarithms of seconds a token
    for _ in range(18):
        middle = (low + high) / 2
        trial = replace(times, decode=decode_speed(config, math.exp(middle)))
        modelled = run_model(work, trial, layout)
        trained = len(modelled.step_ends_s) * work.batch_size
        made = trained + modelled.dropped + modelled.filtered
        if modelled.workers_busy_s / made <= busy_s_per_sample * TOLERANCE:
            low = middle
        else:
            high = middle
    return decode_speed(config, math.exp(low))


def _assumed_of_a_run(config: PipelineConfig) -> tuple[str, ...]:
    floor = FLOOR_SEQUENCES[config.rl.engine.type]
    return (
        f"a decoding step of {floor:.0f} sequences takes twice as long as one of a single sequence",
        f"lengths of turns spread log-normally by {LENGTH_SIGMA}",
        "log-ratios drift with age like a random walk",
        UNHINDERED,
    )


def _teaching(metrics: Sequence[Mapping[str, float]], rl: RLConfig) -> Teaching:
    """Drift from the clip's share and the ESS at the measured mean age."""
    age = _mean(metrics, "staleness_mean", 0.0)
    effective = _within(_mean(metrics, "effective_share", 0.0), 0.0, 1.0)
    kept = _within(_mean(metrics, "kept_token_share", 1.0), 0.0, 1.0)
    ess = _within(_mean(metrics, "ess_share", 1.0), 0.0, 1.0)
    advantage = min(1.0, effective / (kept * ess)) if kept * ess > 0 else 0.0
    if age <= 0:
        return Teaching(advantage)
    sequence = math.sqrt(max(0.0, -math.log(max(ess, 1e-9))) / age)
    low, high = 0.0, 5.0
    for _ in range(40):
        middle = (low + high) / 2
        if clipped_share(middle, *clip_of(rl)) < 1 - kept:
            low = middle
        else:
            high = middle
    return Teaching(advantage, low / math.sqrt(age), sequence)


def _seconds(ledger: Mapping[str, Any], slot_prefix: str = "") -> dict[str, float]:
    slots = ledger.get("seconds")
    totals: dict[str, float] = {}
    for slot, states in slots.items() if isinstance(slots, dict) else ():
        booked = _amounts(states, slot) if slot.startswith(slot_prefix) else {}
        for state, seconds in booked.items():
            totals[state] = totals.get(state, 0.0) + seconds
    return totals


def _amounts(values: Any, what: str) -> dict[str, float]:
    if not isinstance(values, dict):
        raise NoFiguresError(f"{what}: expected amounts by name, found {values!r:.40}")
    return {name: _amount(value, f"{what}.{name}") for name, value in values.items()}


def _amount(value: Any, what: str) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 <= value < MOST:
        raise NoFiguresError(f"{what}={value!r:.40}: expected a number between 0 and {MOST:g}")
    return float(value)


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NoFiguresError(f"{path} cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise NoFiguresError(f"{path} holds a {type(body).__name__}; expected an object")
    return body


def _metrics(path: Path) -> list[Mapping[str, float]]:
    from tasks.artifacts.progress import read_metrics

    if not path.is_file():
        return []
    lines = [line for line in read_metrics(path) if isinstance(line, dict)]
    return [line["values"] for line in lines if isinstance(line.get("values"), dict)]


def _mean(metrics: Sequence[Mapping[str, float]], name: str, default: float) -> float:
    values = [m[name] for m in metrics if isinstance(m.get(name), int | float)]
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else default
