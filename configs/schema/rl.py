"""Settings of the asynchronous RL engine."""

from typing import Literal

from pydantic import Field, model_validator

from configs.schema.base import LOWEST_TEMPERATURE, Config, Seed
from configs.schema.rl_credit import Credit, GrpoCredit
from configs.schema.rl_engines import Engine, TransformersEngineConfig, VllmEngineConfig
from configs.schema.rl_losses import Loss, PpoClip, WeightAlarmConfig, takes_several_steps
from configs.schema.rl_runtimes import InlineRuntime, RayRuntime, Runtime
from configs.schema.rl_tools import ToolSettings
from configs.schema.training import DeepSpeedSettings, Lora, PolicyOptimiser, Trainable


class AdaptiveKl(Config):
    """β moves so that KL stays in a band that narrows from `target_start` to `target_end`."""

    target_start: float = Field(0.1, gt=0)
    target_end: float = Field(0.05, gt=0)
    over_steps: int = Field(100, ge=1)
    band: float = Field(0.5, gt=0, lt=1)
    """Half-width of the band as a share of the target."""
    horizon: float = Field(10.0, gt=0)
    """Steps over which β changes by the clipped error of 0.2."""
    min_coefficient: float = Field(1e-5, gt=0)
    max_coefficient: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _coefficient_has_room(self) -> "AdaptiveKl":
        if self.min_coefficient > self.max_coefficient:
            raise ValueError(
                f"rl.kl.adaptive.min_coefficient={self.min_coefficient} is above "
                f"rl.kl.adaptive.max_coefficient={self.max_coefficient}; lower the first or raise "
                "the second"
            )
        return self


class KlConfig(Config):
    """KL to the SFT snapshot: k2 as a loss times sg(π_θ/μ), or k1 taken off the reward."""

    coefficient: float = Field(0.001, ge=0)
    placement: Literal["loss", "reward"] = "loss"
    adaptive: AdaptiveKl | None = None
    measure_every: int = Field(1, ge=1)
    """Where KL is only watched (coefficient 0, not adaptive), it is measured in every n-th step;
    the pass over the reference takes about a quarter of one."""


class Anneal(Config):
    """A value that goes linearly from `start` to `end` over `over_steps` optimiser steps."""

    start: float
    end: float
    over_steps: int = Field(100, ge=1)


class RolloutSampling(Config):
    """How training samples are drawn; evaluation has a block of its own."""

    temperature: Anneal = Anneal(start=1.0, end=1.0)
    max_new_tokens: int = Field(64, ge=1)
    """Per turn."""
    max_turns: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _temperature_positive(self) -> "RolloutSampling":
        temperature = self.temperature
        if min(temperature.start, temperature.end) < LOWEST_TEMPERATURE:
            raise ValueError(
                f"rl.sampling.temperature={temperature.start}→{temperature.end} must stay at "
                f"{LOWEST_TEMPERATURE} or above: μ is a tempered logprob, and logits divided by "
                "less say nothing in float32"
            )
        return self


class PublishSchedule(Config):
    """Optimiser steps between two publishes, annealed from `start` to `end`."""

    start: int = Field(1, ge=1)
    end: int = Field(1, ge=1)
    over_steps: int = Field(100, ge=1)


class BufferConfig(Config):
    """The version-stamped ring between generator and learner."""

    capacity_batches: int = Field(5, ge=1)
    """Ring size in batches; the staleness limit bounds what is used of it."""
    order: Literal["freshest", "fifo"] = "freshest"
    fresh_share_floor: float = Field(0.0, ge=0, le=1)
    """Share of a batch that should be of the newest version; what is too old is evicted first."""
    when_stale: Literal["pause", "lower_lr"] = "pause"
    """Below the floor: `pause` waits for new samples while any are on their way; `lower_lr` trains
    at once, with the learning rate times fresh share / floor."""


class OverlongPenalty(Config):
    """Taken off the reward of long answers, rising from nothing to `factor` (arXiv 2503.14476)."""

    expected_tokens: int = Field(ge=0)
    """Sampled tokens of an episode, over all its turns, up to which nothing is taken."""
    cutoff_tokens: int = Field(ge=1)
    """Sampled tokens from which on the whole of `factor` is taken."""
    factor: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _rises(self) -> "OverlongPenalty":
        if self.expected_tokens >= self.cutoff_tokens:
            raise ValueError(
                f"rl.reward.overlong.expected_tokens={self.expected_tokens} is not below "
                f"cutoff_tokens={self.cutoff_tokens}; the penalty rises between the two"
            )
        return self


class RewardConfig(Config):
    """Outcome and process rewards."""

    outcome: float = Field(1.0, gt=0)
    format: Anneal = Anneal(start=0.05, end=0.0)
    """Paid for a well-formed final answer, annealed to zero; at most a tenth of `outcome`."""
    overlong: OverlongPenalty | None = None

    @model_validator(mode="after")
    def _process_small(self) -> "RewardConfig":
        if min(self.format.start, self.format.end) < 0:
            raise ValueError(
                f"rl.reward.format={self.format.start}→{self.format.end} is below 0: a well-formed "
                "answer would cost what a malformed one does not; use 0 or more"
            )
        if max(self.format.start, self.format.end) > 0.1 * self.outcome:
            raise ValueError(
                f"rl.reward.format={self.format.start}→{self.format.end} exceeds a tenth of "
                f"rl.reward.outcome={self.outcome}; process rewards stay small"
            )
        return self


class SentinelConfig(Config):
    """When a batch's rewards look wrong the grader answers known-answer probes."""

    warmup_batches: int = Field(5, ge=1)
    max_unscored_share: float = Field(0.2, ge=0, le=1)
    drift_sigmas: float = Field(6.0, gt=0)
    """Batch mean this many running deviations off is suspicious."""


class RewardGateConfig(Config):
    """Great Expectations suite over the outcomes of each cycle's batch, beside the step."""

    max_missing_share: float = Field(0.2, ge=0, le=1)
    """Of the samples, those the verifier could not score."""
    min_mean: float | None = Field(None, ge=0, le=1)
    max_mean: float | None = Field(None, ge=0, le=1)
    min_std: float = Field(0.01, ge=0)
    """Sample standard deviation; 0 leaves the check out."""
    max_saturated_share: float = Field(0.99, ge=0, le=1)
    """Of the scored samples, those that are wrong, and those that are right."""
    stop_after: int | None = Field(None, ge=1)
    """Failed cycles in a row that stop the run, resumably; None goes on and tells."""

    @model_validator(mode="after")
    def _mean_has_room(self) -> "RewardGateConfig":
        low, high = self.min_mean, self.max_mean
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"rl.reward_gate.min_mean={low} is above rl.reward_gate.max_mean={high}; no batch "
                "could pass"
            )
        return self


class RLConfig(Config):
    """Asynchronous RL: two coroutines, bounded staleness, proven weight sync."""

    steps: int = Field(200, ge=1)
    """Optimiser steps."""
    batch_size: int = Field(128, ge=1)
    """Samples per batch; a multiple of `group_size`."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps a batch is cut into, each on whole groups; more than one needs a loss with a
    proximal policy. A publish or checkpoint that falls due amid a batch comes at its end."""
    group_size: int = Field(8, ge=1)
    staleness_limit: int = Field(2, ge=0)
    """η: no token older than this many optimiser steps when its batch begins is trained on; 0 is
    synchronous."""
    publish: PublishSchedule = PublishSchedule()
    buffer: BufferConfig = BufferConfig()
    runtime: Runtime = RayRuntime()
    engine: Engine = TransformersEngineConfig()
    trainable: Trainable = Lora()
    optimiser: PolicyOptimiser = PolicyOptimiser(lr=1e-5)
    deepspeed: DeepSpeedSettings = DeepSpeedSettings()
    credit: Credit = GrpoCredit()
    loss: Loss = PpoClip()
    weight_alarm: WeightAlarmConfig = WeightAlarmConfig()
    kl: KlConfig = KlConfig()
    sampling: RolloutSampling = RolloutSampling()
    play_timeout_s: float = Field(600.0, gt=0)
    """Seconds the episodes of one prompt may take; then they are given up and it is dispatched
    again. A worker that finished nothing at all in this time is replaced."""
    tools: ToolSettings = ToolSettings()
    filter: Literal["none", "zero_variance"] = "none"
    """`zero_variance` throws groups away whose rewards are all alike, and samples others instead
    (dynamic sampling, arXiv 2503.14476)."""
    max_refill_factor: float = Field(8.0, gt=0)
    """Batches' worth of samples the filter may throw away for one step before the run ends."""
    reward: RewardConfig = RewardConfig()
    sentinel: SentinelConfig = SentinelConfig()
    reward_gate: RewardGateConfig = RewardGateConfig()
    skip_zero_advantage: bool = False
    """Leave samples without an advantage out of the step; their KL gradient is forgone."""
    checkpoint_every: int = Field(1, ge=1)
    """Optimiser steps between checkpoints."""
    keep_samples: bool = True
    """Keep every sample that is trained on in the stage's folder, so that its rewards can be
    replayed (`rl-pipeline replay`); a few bytes a token."""
    stall_after_s: float = Field(600.0, gt=0)
    """Whoever waits longer is logged, with the chain of whom it waits for."""
    stall_abort_s: float = Field(3000.0, gt=0)
    """Whoever waits longer ends the run, resumably; longer than any step or episode may take."""
    seed: Seed = 0

    @property
    def in_turns(self) -> bool:
        """Whether generator and learner never work at once: then whole batches are played in
        lockstep, and a run is repeatable."""
        return self.staleness_limit == 0 or isinstance(self.runtime, InlineRuntime)

    @model_validator(mode="after")
    def _colocated_takes_turns(self) -> "RLConfig":
        colocated = isinstance(self.engine, VllmEngineConfig) and self.engine.colocated
        if colocated and not isinstance(self.runtime, InlineRuntime):
            raise ValueError(
                f"rl.engine.colocated=true with rl.runtime.type={self.runtime.type}: generator and "
                "learner can only take turns on one GPU inside one process; use "
                "rl.runtime.type=inline, or colocated=false"
            )
        return self

    @model_validator(mode="after")
    def _loop_can_be_fed(self) -> "RLConfig":
        if self.batch_size % self.group_size:
            nearest = self.group_size * max(1, self.batch_size // self.group_size)
            raise ValueError(
                f"rl.batch_size={self.batch_size} is not a multiple of rl.group_size="
                f"{self.group_size}; try {nearest}"
            )
        if max(self.publish.start, self.publish.end) > self.staleness_limit + 1:
            raise ValueError(
                f"rl.publish={self.publish.start}→{self.publish.end} is above rl.staleness_limit+1="
                f"{self.staleness_limit + 1}: the loop could not be fed without breaking the "
                "staleness limit; publish more often or raise rl.staleness_limit"
            )
        if self.stall_abort_s < self.stall_after_s:
            raise ValueError(
                f"rl.stall_abort_s={self.stall_abort_s:g} is below rl.stall_after_s="
                f"{self.stall_after_s:g}; a stall is told before it ends the run"
            )
        if self.group_size < 2 and self.credit.type != "turn_gae":
            raise ValueError(
                f"rl.group_size={self.group_size} with rl.credit.type={self.credit.type}: a group "
                "of one has no baseline; use 2 or more, or rl.credit.type=turn_gae"
            )
        return self

    @model_validator(mode="after")
    def _filter_leaves_something(self) -> "RLConfig":
        if self.filter == "zero_variance" and self.group_size < 2:
            raise ValueError(
                f"rl.filter=zero_variance with rl.group_size={self.group_size}: the reward of a "
                "group of one is like itself, so every group would be thrown away; use "
                "rl.filter=none or a rl.group_size of 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _several_steps_fit(self) -> "RLConfig":
        updates = self.updates_per_batch
        if updates > 1 and not takes_several_steps(self.loss):
            raise ValueError(
                f"rl.updates_per_batch={updates} with rl.loss.type={self.loss.type}: after the "
                "first step on a batch the clip must be around the policy the batch began with, "
                "not around the sampler; use rl.loss.type=decoupled_ppo or rl.updates_per_batch=1"
            )
        groups = self.batch_size // self.group_size
        if updates > groups:
            raise ValueError(
                f"rl.updates_per_batch={updates} is more than the {groups} group(s) of a batch "
                f"(rl.batch_size={self.batch_size} / rl.group_size={self.group_size}): each step "
                f"takes whole groups; try {groups}, or a larger rl.batch_size"
            )
        if self.steps % updates:
            raise ValueError(
                f"rl.steps={self.steps} is not a multiple of rl.updates_per_batch={updates}: the "
                f"last batch would be cut short; try {max(1, self.steps // updates) * updates}"
            )
        return self
