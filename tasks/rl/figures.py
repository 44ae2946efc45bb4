"""What a plan is made from: how long things took in a run, or are assumed to take on a device.

A run's ledger gives seconds by slot and state, its metrics the lengths and how much of a batch
taught something. Decoding is told apart from waiting, for tools or for a batch in the making, by
modelling the run itself: the decode speed is the one at which the modelled run keeps its workers
busy as long as the real one did.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from configs.schema.rl import RLConfig
from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.rl_runtimes import InlineRuntime
from configs.schema.training import Lora
from tasks.models.shapes import ModelShape
from tasks.rl.simulate import simulate
from tasks.rl.simulated_engines import DecodeSpeed, LatencyMix, LengthMix
from tasks.rl.simulated_work import Modelled, Times, Work

FLOOR_SEQUENCES = {"vllm": 64.0, "transformers": 8.0}
"""Sequences at which a decoding step takes twice as long as one of a single sequence."""
LENGTH_SIGMA = 0.5
CALIBRATION_STEPS = 10
TOLERANCE = 1.01
"""Of a modelled run's busy time, over the real one's."""
MOST = 1e12
"""Seconds or samples above which a number is a mistake."""
ASSUMED_ANSWER = 0.6
"""Share of `max_new_tokens` a turn takes where nothing was measured."""
ASSUMED_EFFECTIVE = 0.5
"""Share of samples with an advantage where nothing was measured."""
GPU = {"flops": 312e12, "bytes_per_s": 2.0e12, "use": 0.35}
CPU = {"flops": 80e9, "bytes_per_s": 1.0e10, "use": 0.5}
"""A device where nothing was measured: an A100's sheet, a server's core; and the share reached."""


class NoFiguresError(ValueError):
    """A run left nothing that a plan could be made from."""


@dataclass(frozen=True)
class Layout:
    """Rollout workers and learner ranks, each on a device of its own unless `shared`."""

    workers: int
    ranks: int
    shared: bool = False
    """Both sides take turns on the same devices."""

    @property
    def devices(self) -> int:
        """Devices in all."""
        return max(self.workers, self.ranks) if self.shared else self.workers + self.ranks


@dataclass(frozen=True)
class Teaching:
    """How much of a sample teaches, by its age; log-ratios drift like a random walk."""

    advantage_share: float
    """Samples with a non-zero advantage."""
    token_drift: float = 0.0
    """Standard deviation of a token's log-ratio after one step of age."""
    sequence_drift: float = 0.0
    """The same of a whole sample's."""

    def effective_share(self, age: float, clip_low: float, clip_high: float) -> float:
        """Effective samples of a trained one, `age` optimiser steps old."""
        kept = 1 - clipped_share(self.token_drift * math.sqrt(age), clip_low, clip_high)
        return self.advantage_share * kept * math.exp(-(self.sequence_drift**2) * age)


def clipped_share(sigma: float, clip_low: float, clip_high: float) -> float:
    """Share of tokens a PPO clip silences where log-ratios are normal with this deviation and half
    of the advantages are positive."""
    if sigma <= 0:
        return 0.0
    high = math.log1p(clip_high) / sigma
    low = -math.log1p(-clip_low) / sigma
    return (math.erfc(high / math.sqrt(2)) + math.erfc(low / math.sqrt(2))) / 4


@dataclass(frozen=True)
class Figures:
    """Seconds of one worker and one layout, and what they were taken from."""

    source: str
    assumptions: tuple[str, ...]
    layout: Layout
    times: Times
    work: Work
    """As measured: settings, lengths, tools and filters."""
    teaching: Teaching
    startup_s: float = 0.0
    clip: tuple[float, float] = (1 - 1e-12, math.inf)
    """How far below and above 1 the loss lets ratios push."""


def layout_of(config: PipelineConfig) -> Layout:
    """The layout a config asks for."""
    runtime = config.rl.runtime
    if isinstance(runtime, InlineRuntime):
        return Layout(1, 1, shared=True)
    shared = 0 < runtime.gpus_per_rollout < 1 and 0 < runtime.gpus_per_learner < 1
    return Layout(runtime.rollout_workers, runtime.learner_ranks, shared)


def clip_of(rl: RLConfig) -> tuple[float, float]:
    """How far below and above 1 the loss lets ratios push; endless where it has no such bound."""
    low, high = getattr(rl.loss, "clip_low", 1.0), getattr(rl.loss, "clip_high", math.inf)
    return min(float(low), 1 - 1e-12), float(high)


def work_of(config: PipelineConfig, steps: int) -> Work:
    """The loop's settings as work, with the tools' latency."""
    tools = config.rl.tools
    latency = tools.simulated_latency
    mix = LatencyMix(latency.median_s, latency.sigma, latency.max_s) if latency else None
    turns = float(config.rl.sampling.max_turns)
    mean = max(1.0, ASSUMED_ANSWER * config.rl.sampling.max_new_tokens)
    return replace(
        Work.of(config.rl, steps),
        turns_mean=turns,
        tokens=LengthMix(mean, LENGTH_SIGMA, config.rl.sampling.max_new_tokens),
        tool_latency=mix,
        tool_concurrency=tools.concurrency,
    )


def decode_speed(config: PipelineConfig, per_sequence_s: float) -> DecodeSpeed:
    """An engine's speed from one number; its floor is that of engines of its type."""
    engine = config.rl.engine
    floor = FLOOR_SEQUENCES[engine.type]
    continuous = isinstance(engine, VllmEngineConfig)
    return DecodeSpeed(floor * per_sequence_s, per_sequence_s, engine.max_sequences, continuous)


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


def run_model(work: Work, times: Times, layout: Layout, seed: int = 0) -> Modelled:
    """Model a layout: in lockstep where its sides never work at once."""
    lockstep = layout.shared or work.staleness_limit == 0
    return simulate(
        work, times, layout.workers, lockstep=lockstep, one_device=layout.shared, seed=seed
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


def assumed_figures(config: PipelineConfig, shape: ModelShape) -> Figures:
    """Figures of a device's sheet, where no run has measured any; every one is named."""
    on_gpu = config.requires.gpus > 0
    device = GPU if on_gpu else CPU
    size = 2 if on_gpu or config.rl.deepspeed.dtype == "bfloat16" else 4
    work = work_of(config, CALIBRATION_STEPS)
    speed = device["flops"] * device["use"]
    length = work.tokens.mean * work.turns_mean + 128
    # a token's forward of policy and reference is 2 P each, the backward 2 P, and 2 P more where
    # every weight has a gradient
    work_per_weight = 6.0 if isinstance(config.rl.trainable, Lora) else 8.0
    train_s = work_per_weight * shape.parameters * length * config.rl.batch_size / speed
    layout = layout_of(config)
    step_s = shape.parameters * size / device["bytes_per_s"]
    per_sequence_s = 2.0 * shape.parameters / speed
    engine = config.rl.engine
    continuous = isinstance(engine, VllmEngineConfig)
    kind = "an A100's 312 TFLOP/s and 2 TB/s" if on_gpu else "80 GFLOP/s and 10 GB/s a core"
    return Figures(
        source="assumed, nothing was measured here yet",
        assumptions=(
            f"{kind}, of which {device['use']:.0%} is reached",
            f"turns of {ASSUMED_ANSWER:.0%} of max_new_tokens, 128 tokens of prompt",
            f"{ASSUMED_EFFECTIVE:.0%} of samples have an advantage, none is clipped",
            "publishing takes 1 s, proving 1 s" if on_gpu else "publishing and proving 0.1 s",
        ),
        layout=layout,
        times=Times(
            DecodeSpeed(step_s, per_sequence_s, engine.max_sequences, continuous),
            train_s=train_s / layout.ranks,
            publish_s=1.0 if on_gpu else 0.1,
            prove_s=1.0 if on_gpu else 0.1,
        ),
        work=work,
        teaching=Teaching(ASSUMED_EFFECTIVE),
        clip=clip_of(config.rl),
    )


def _assumed_of_a_run(config: PipelineConfig) -> tuple[str, ...]:
    floor = FLOOR_SEQUENCES[config.rl.engine.type]
    return (
        f"a decoding step of {floor:.0f} sequences takes twice as long as one of a single sequence",
        f"lengths of turns spread log-normally by {LENGTH_SIGMA}",
        "log-ratios drift with age like a random walk",
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
