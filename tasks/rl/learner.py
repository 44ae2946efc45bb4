"""The learner: one optimiser step per batch, the reference inside it, and its own state on disk."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from configs.schema import PipelineConfig
from configs.schema.rl_credit import TurnGaeCredit
from configs.schema.training import FullWeights
from tasks.artifacts.atomic import write_atomic
from tasks.artifacts.content_hash import hash_tensors
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row
from tasks.models.load import hash_model, load_model, load_tokenizer, save_model
from tasks.models.merge import merged_tensors
from tasks.models.policy import PolicyModule, PolicyScores
from tasks.models.train_engine import StepStats, TrainEngine
from tasks.models.trainable import attach, freeze_reference, load_trainable, trainable_tensors
from tasks.rl.batch import Sample, rows_of, samples_of, train_batches, without_credit
from tasks.rl.controllers import loss_at
from tasks.rl.effective import EffectiveSamples
from tasks.rl.errors import ReferenceMismatchError
from tasks.rl.kl import k1_in_reward, kl_loss, sequence_k1
from tasks.rl.losses import (
    StepVersions,
    merge_metrics,
    policy_denominator,
    policy_loss,
    summarise,
    value_denominator,
    value_loss,
)
from tasks.rl.types import Group, ScoredRollout, TrainBatch
from tasks.rl.weight_sync import Canary, Receipt, publish
from tasks.sampling.types import PolicyVersion

CANARY_SEQUENCES = 8


@dataclass(frozen=True)
class StepReport:
    """What one batch did."""

    learner_version: int
    """Optimiser steps taken after it; the same as before where the step was skipped."""
    skipped: bool
    effective_samples: float
    metrics: dict[str, float]


class Learner:
    """Policy, frozen reference and optimiser of one rank."""

    def __init__(
        self,
        config: PipelineConfig,
        snapshot: Path,
        snapshot_sha256: str,
        canary_rows: Sequence[Row],
        *,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._config = config.rl
        found = hash_model(snapshot)
        if found != snapshot_sha256:
            raise ReferenceMismatchError(
                f"the SFT snapshot in {snapshot} has hash {found[:12]}, recorded was "
                f"{snapshot_sha256[:12]}; RL would drift from an unknown reference. Run the sft "
                "stage again (`rl-pipeline run --force sft`)"
            )
        rl = config.rl
        model = load_model(snapshot, dtype=rl.deepspeed.dtype)
        self._tokenizer = load_tokenizer(snapshot)
        self.packed = packed = rl.deepspeed.micro_batching == "packed"
        self._frozen: PolicyModule | None = None
        if isinstance(rl.trainable, FullWeights):
            self._frozen = PolicyModule(
                copy.deepcopy(model), value_head=False, seed=rl.seed, packed=packed
            )
            self._frozen.requires_grad_(False).eval()
        trained = attach(model, rl.trainable, rl.seed)
        freeze_reference(trained)
        with_values = isinstance(rl.credit, TurnGaeCredit)
        self._module = PolicyModule(trained, value_head=with_values, seed=rl.seed, packed=packed)
        self._engine = TrainEngine(self._module, rl.optimiser, rl.deepspeed, total_steps=rl.steps)
        self._module.train()
        renderer = PromptRenderer(self._tokenizer, config.system_prompt)
        self._canary = _canary_sequences(canary_rows, renderer)
        self._published_logprobs: tuple[float, ...] | None = None

    @property
    def learner_version(self) -> int:
        """Optimiser steps taken."""
        return self._engine.steps_taken

    def train(
        self, groups: Sequence[Group], kl_coefficient: float, lr_scale: float = 1.0
    ) -> StepReport:
        """Take one optimiser step on a batch of groups, at the scheduled rate times `lr_scale`."""
        started_s = time.monotonic()
        scored = _Prepass(self, groups, kl_coefficient)
        samples = samples_of(scored.groups, self._config.credit, scored.values)
        trained = self._worth_a_gradient(samples)
        batches = train_batches(trained, self.micro_batch_tokens, packed=self.packed)
        max_tokens = self._config.sampling.max_new_tokens * self._config.sampling.max_turns
        denominator = policy_denominator(batches, self._config.loss, max_tokens)
        value_count = value_denominator(batches) if scored.with_values else 0.0
        parts = [self._accumulate(b, denominator, value_count, kl_coefficient) for b in batches]
        stats = self._engine.step(lr_scale)
        metrics = summarise(merge_metrics([p for p, _ in parts]))
        metrics["entropy_mean"] = sum(e for _, e in parts) / max(1, _action_tokens(trained))
        metrics["train_tokens_per_s"] = _tokens(trained) / (time.monotonic() - started_s)
        metrics.update(_step_metrics(stats, samples))
        effective = _effective(samples, metrics, stats)
        metrics["effective_share"] = effective / len(samples)
        return StepReport(self.learner_version, stats.skipped, effective, metrics)

    def _worth_a_gradient(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples a step trains on: all, or those with an advantage where there are any."""
        if not self._config.skip_zero_advantage:
            return samples
        return [s for s in samples if any(s.advantages)] or samples

    def _accumulate(
        self, batch: TrainBatch, denominator: float, value_count: float, kl_coefficient: float
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Add one micro-batch's gradient; gives metric sums and the sum of entropies."""
        reference = self.reference_logprobs(batch)
        scores = self._forward(batch)
        loss_now = loss_at(self._config.loss, self.learner_version)
        versions = StepVersions(self.learner_version, self.learner_version)
        policy = policy_loss(scores.logprobs_B_T, batch, loss_now, denominator, versions=versions)
        aggregation = loss_now.aggregation
        kl = kl_loss(scores.logprobs_B_T, reference, batch, denominator, aggregation)
        loss, metrics = policy.loss, policy.metrics | kl.metrics
        if self._config.kl.placement == "loss" and kl_coefficient:
            loss = loss + kl_coefficient * kl.loss
        if scores.values_B_T is not None and isinstance(self._config.credit, TurnGaeCredit):
            value = value_loss(scores.values_B_T, batch, value_count)
            loss = loss + self._config.credit.value_coefficient * value.loss
            metrics = metrics | value.metrics
        self._engine.backward(loss)
        return metrics, float(scores.entropy_B_T.detach().sum())

    def _forward(self, batch: TrainBatch) -> PolicyScores:
        scores = self._engine.forward(
            batch.token_ids_B_T, batch.valid_B_T, batch.action_mask_B_T, batch.temperature_B
        )
        assert isinstance(scores, PolicyScores)
        return scores

    @torch.no_grad()
    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """float32, (B, T), nats: the frozen snapshot's scores of the batch's actions."""
        arguments = (
            batch.token_ids_B_T, batch.valid_B_T, batch.action_mask_B_T, batch.temperature_B,
        )  # fmt: skip
        if self._frozen is not None:
            scores: PolicyScores = self._frozen(*arguments)
        else:
            with self._module.as_reference():
                scores = self._module(*arguments)
        return scores.logprobs_B_T

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> torch.Tensor | None:
        """float32, (B, T): the value head everywhere, None without one."""
        values: torch.Tensor | None = self._module(
            batch.token_ids_B_T, batch.valid_B_T, batch.action_mask_B_T, batch.temperature_B
        ).values_B_T
        return values

    @property
    def with_values(self) -> bool:
        """Whether a value head is trained."""
        return self._module.value_head is not None

    @property
    def micro_batch_tokens(self) -> int:
        """Padded tokens of one forward pass."""
        return self._config.deepspeed.micro_batch_tokens

    @property
    def kl_in_reward(self) -> bool:
        """Whether KL comes off the reward."""
        return self._config.kl.placement == "reward"

    @torch.no_grad()
    def _canary_logprobs(self) -> tuple[float, ...]:
        """Scores of the canary's tokens at temperature 1, one after another."""
        training = self._module.training
        self._module.eval()
        flat: list[float] = []
        for sequence in self._canary:
            ids = torch.tensor([sequence])
            everything = torch.ones_like(ids, dtype=torch.bool)
            everything[0, 0] = False
            scores = self._module(ids, torch.ones_like(everything), everything, torch.ones(1))
            flat += scores.logprobs_B_T[0, 1:].tolist()
        self._module.train(training)
        return tuple(flat)

    def publish(self, root: Path, attempt: int) -> Receipt:
        """Write the present weights for the engines; see `weight_sync`."""
        logprobs = self._canary_logprobs()
        canary = Canary(self._canary, logprobs, self._published_logprobs)
        self._published_logprobs = logprobs
        return publish(
            root,
            PolicyVersion(attempt, self.learner_version),
            trainable_tensors(self._module.model),
            canary,
            keep=self._config.staleness_limit + 2,
        )

    def save(self, folder: Path) -> dict[str, str]:
        """Write trained weights, value head and optimiser; returns the hash of each part."""
        parts = {"policy": trainable_tensors(self._module.model)}
        parts["optimiser"] = self._engine.state_tensors()
        if self._module.value_head is not None:
            parts["value_head"] = dict(self._module.value_head.state_dict())
        for name, tensors in parts.items():
            plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
            write_atomic(folder / f"{name}.safetensors", save(plain))
        return {name: hash_tensors(tensors) for name, tensors in parts.items()}

    def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        """Take back what `save` wrote; returns the hash of each part as it now is in memory."""
        load_trainable(self._module.model, load_file(folder / "policy.safetensors"))
        self._engine.load_state_tensors(load_file(folder / "optimiser.safetensors"), steps_taken)
        if self._module.value_head is not None:
            self._module.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
        parts = {
            "policy": trainable_tensors(self._module.model),
            "optimiser": self._engine.state_tensors(),
        }
        if self._module.value_head is not None:
            parts["value_head"] = dict(self._module.value_head.state_dict())
        return {name: hash_tensors(tensors) for name, tensors in parts.items()}

    def save_policy(self, out_dir: Path) -> str:
        """Write the merged policy as an HF folder, and the adapter beside it; returns the hash."""
        if not isinstance(self._config.trainable, FullWeights):
            write_atomic(
                out_dir / "adapter" / "weights.safetensors",
                save({k: v.contiguous() for k, v in trainable_tensors(self._module.model).items()}),
            )
        return save_model(
            self._module.causal_model,
            self._tokenizer,
            out_dir / "policy",
            tensors=merged_tensors(self._module.model),
        )


class _Prepass:
    """Scores that credit needs: values, and rewards with KL taken off. Often there are none."""

    def __init__(self, learner: Learner, groups: Sequence[Group], kl_coefficient: float) -> None:
        self.with_values = learner.with_values
        self.groups = list(groups)
        self.values: dict[str, list[float]] = {}
        if not (self.with_values or learner.kl_in_reward):
            return
        samples = without_credit(groups, with_values=self.with_values)
        penalties: dict[str, float] = {}
        rows = rows_of(samples, learner.micro_batch_tokens, packed=learner.packed)
        batches = train_batches(samples, learner.micro_batch_tokens, packed=learner.packed)
        for indices, batch in zip(rows, batches, strict=True):
            reference = learner.reference_logprobs(batch)
            rollouts = [samples[i].scored.rollout for i in indices]
            k1 = sequence_k1(batch.sampler_logprobs_B_T, reference, batch.action_mask_B_T)
            penalties |= zip((r.rollout_id for r in rollouts), k1.tolist(), strict=True)
            if (values := learner.values(batch) if self.with_values else None) is not None:
                for i, rollout in enumerate(rollouts):
                    before = [turn.start - 1 for turn in rollout.turns]
                    self.values[rollout.rollout_id] = values[i, before].tolist()
        if learner.kl_in_reward:
            self.groups = [_penalise(g, penalties, kl_coefficient) for g in groups]


def _penalise(group: Group, penalties: dict[str, float], coefficient: float) -> Group:
    ids = [r.rollout.rollout_id for r in group.rollouts]
    rewards = k1_in_reward(
        [r.reward for r in group.rollouts], [penalties[i] for i in ids], coefficient
    )
    return Group(
        group.group_id,
        group.row_id,
        tuple(
            ScoredRollout(
                r.rollout,
                reward,
                r.outcome,
                r.components,
                (*r.turn_rewards[:-1], r.turn_rewards[-1] - coefficient * penalties[i]),
            )
            for r, reward, i in zip(group.rollouts, rewards, ids, strict=True)
        ),
    )


def _canary_sequences(rows: Sequence[Row], renderer: PromptRenderer) -> tuple[tuple[int, ...], ...]:
    sequences = []
    for row in rows[:CANARY_SEQUENCES]:
        messages = [{"role": "user", "content": row.prompt}]
        answer = {"role": "assistant", "content": row.answer}
        sequences.append(tuple(renderer.supervised([*messages, answer])[0]))
    return tuple(sequences)


def _action_tokens(samples: Sequence[Sample]) -> int:
    return sum(s.scored.rollout.sampled_tokens for s in samples)


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(s.scored.rollout.token_ids) for s in samples)


def _step_metrics(stats: StepStats, samples: Sequence[Sample]) -> dict[str, float]:
    rollouts = [s.scored.rollout for s in samples]
    outcomes = [s.scored.outcome for s in samples if s.scored.outcome is not None]
    rewards = [s.scored.reward for s in samples if s.scored.reward is not None]
    count = len(samples)
    return {
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "reward_mean": sum(rewards) / len(rewards) if rewards else math.nan,
        "accuracy": sum(outcomes) / len(outcomes) if outcomes else math.nan,
        "unscored_share": 1 - len(outcomes) / count,
        "tool_call_share": sum(r.tool_calls > 0 for r in rollouts) / count,
        "truncated_share": sum(r.truncated for r in rollouts) / count,
        "trained_tokens_mean": sum(r.sampled_tokens for r in rollouts) / count,
        "turns_mean": sum(len(r.turns) for r in rollouts) / count,
    }


def _effective(samples: Sequence[Sample], metrics: dict[str, float], stats: StepStats) -> float:
    """Effective samples of the step; none where it was skipped or nothing had an advantage."""
    learning = sum(any(s.advantages) for s in samples)
    if stats.skipped or not learning:
        return 0.0
    return EffectiveSamples(learning, metrics["kept_token_share"], metrics["ess_share"]).value
