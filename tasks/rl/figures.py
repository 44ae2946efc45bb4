"""What a plan is made from: how long things take, how samples are laid out and what they teach.

Read off a run (`figures_of_runs`), or assumed from a device's sheet.
"""

import math
from dataclasses import dataclass, replace

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
ASSUMED_ANSWER = 0.6
"""Share of `max_new_tokens` a turn takes where nothing was measured."""
ASSUMED_EFFECTIVE = 0.5
"""Share of samples with an advantage where nothing was measured."""
GPU = {"flops": 312e12, "bytes_per_s": 2.0e12, "use": 0.35}
CPU = {"flops": 80e9, "bytes_per_s": 1.0e10, "use": 0.5}
"""A device where nothing was measured: an A100's sheet, a server's core; and the share reached."""


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
    times_in_turns: Times | None = None
    """The same where the sides never work at once; None = they do not slow each other."""

    def times_of(self, work: Work, layout: Layout) -> Times:
        """Of a side beside the other, or of one that works alone."""
        alone = self.times_in_turns if in_turns(work, layout) else None
        return alone or self.times


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


def in_turns(work: Work, layout: Layout) -> bool:
    """Whether generator and learner never work at once."""
    return layout.shared or work.staleness_limit == 0


def run_model(work: Work, times: Times, layout: Layout, seed: int = 0) -> Modelled:
    """Model a layout: in lockstep where its sides never work at once."""
    return simulate(
        work,
        times,
        layout.workers,
        lockstep=in_turns(work, layout),
        one_device=layout.shared,
        seed=seed,
    )


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
