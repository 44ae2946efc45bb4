"""The learner: optimiser steps on a batch, the reference inside it, and its own state on disk."""

import copy
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from configs.schema import PipelineConfig
from configs.schema.rl_credit import TurnGaeCredit
from configs.schema.rl_losses import Loss
from configs.schema.training import FullWeights
from tasks.artifacts.content_hash import hash_tensors
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row
from tasks.models.batching import right_padded
from tasks.models.load import hash_model, load_model, load_tokenizer, save_model
from tasks.models.merge import merged_tensors
from tasks.models.policy import PolicyModule, PolicyScores
from tasks.models.ranks import RankGroup, add_up, rank, whole, world_size
from tasks.models.train_engine import TrainEngine
from tasks.models.trainable import (
    attach,
    copy_into,
    freeze_reference,
    load_trainable,
    trainable_tensors,
    without_dropout,
)
from tasks.models.weights_file import read_weights, write_weights
from tasks.rl.batch import (
    Sample,
    collate,
    in_parts,
    on_device,
    rows_of,
    samples_of,
    silent,
)
from tasks.rl.controllers import loss_at
from tasks.rl.errors import CheckpointMismatchError, ReferenceMismatchError
from tasks.rl.kl import kl_loss
from tasks.rl.learner_metrics import StepReport, Update, batch_metrics, over_ranks, rate_scale
from tasks.rl.learner_prepass import prepass
from tasks.rl.losses import (
    StepVersions,
    needs_proximal,
    policy_denominator,
    policy_loss,
    value_denominator,
    value_loss,
)
from tasks.rl.soundness import require_vocabulary
from tasks.rl.types import Group, TrainBatch
from tasks.rl.weight_sync import Canary, Receipt, publish
from tasks.sampling.types import PolicyVersion

__all__ = ["CANARY_SEQUENCES", "Learner", "StepReport"]

CANARY_SEQUENCES = 8


class Learner:
    """Policy, frozen reference and optimiser of one rank.

    With several ranks every one gets the same calls. Each trains on its own share of the batch, and
    all give the same report.
    """

    def __init__(
        self,
        config: PipelineConfig,
        snapshot: Path,
        snapshot_sha256: str,
        canary_rows: Sequence[Row],
        *,
        threads: int | None = None,
        group: RankGroup | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._config = rl = config.rl
        found = hash_model(snapshot)
        if found != snapshot_sha256:
            raise ReferenceMismatchError(
                f"the SFT snapshot in {snapshot} has hash {found[:12]}, recorded was "
                f"{snapshot_sha256[:12]}; RL would drift from an unknown reference. Run the sft "
                "stage again (`rl-pipeline run --force sft`)"
            )
        self._snapshot = snapshot
        model = load_model(snapshot, dtype=rl.deepspeed.dtype)
        self._tokenizer = load_tokenizer(snapshot)
        self._frozen: PolicyModule | None = None
        if isinstance(rl.trainable, FullWeights):
            self._frozen = self._policy(copy.deepcopy(model), value_head=False)
            self._frozen.requires_grad_(False).eval()
        trained = attach(model, rl.trainable, rl.seed)
        freeze_reference(trained)
        self._module = self._policy(trained, value_head=isinstance(rl.credit, TurnGaeCredit))
        self._engine = TrainEngine(
            self._module, rl.optimiser, rl.deepspeed, total_steps=rl.steps, group=group
        )
        if self._frozen is not None:
            self._frozen.to(self._engine.device)
        self._module.train()
        renderer = PromptRenderer(self._tokenizer, config.system_prompt)
        self._canary = _canary_sequences(canary_rows, renderer)
        self._published_logprobs: tuple[float, ...] | None = None

    def _policy(self, model: torch.nn.Module, *, value_head: bool) -> PolicyModule:
        rl = self._config
        return PolicyModule.of(model, rl.deepspeed, value_head=value_head, seed=rl.seed)

    @property
    def learner_version(self) -> int:
        """Optimiser steps taken."""
        return self._engine.steps_taken

    @property
    def with_values(self) -> bool:
        """Whether a value head is trained."""
        return self._module.value_head is not None

    @property
    def kl_in_reward(self) -> bool:
        """Whether KL comes off the reward."""
        return self._config.kl.placement == "reward"

    # -- training -------------------------------------------------------------------------------

    def train(
        self,
        groups: Sequence[Group],
        kl_coefficient: float,
        lr_scale: float = 1.0,
        tightness: float = 1.0,
    ) -> StepReport:
        """Train on a batch of groups: `rl.updates_per_batch` optimiser steps, each on its part.

        `lr_scale` multiplies the scheduled learning rate, `tightness` the bounds of the loss.

        Raises:
            NonFiniteStepError: too many steps in a row had a non-finite gradient.
            UnsoundSampleError: a sample contradicts itself, or has tokens the model does not know.
        """
        started_s = time.monotonic()
        require_vocabulary(groups, self._module.causal_model.config.vocab_size)
        scored = prepass(self, groups, kl_coefficient)
        samples = samples_of(scored.groups, self._config.credit, scored.values)
        trained = self._worth_a_gradient(samples)
        first_version = self.learner_version
        # A skipped step shifts the batches after it: the last one may have fewer steps left.
        steps = min(self._config.updates_per_batch, max(1, self._config.steps - first_version))
        parts = [(part, self.share(part)) for part in in_parts(trained, steps)]
        proximal = self._proximal([share for _, share in parts])
        updates = [
            self._update(part, share, scores, first_version, kl_coefficient, lr_scale, tightness)
            for (part, share), scores in zip(parts, proximal, strict=True)
        ]
        metrics = batch_metrics(updates, samples)
        tokens = sum(len(s.scored.rollout.token_ids) for s in trained)
        metrics["train_tokens_per_s"] = tokens / (time.monotonic() - started_s)
        effective = sum(update.effective for update in updates)
        metrics["effective_share"] = effective / len(samples)
        skipped = all(update.stats.skipped for update in updates)
        return StepReport(self.learner_version, skipped, effective, metrics)

    def _worth_a_gradient(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples a step trains on: all, or those with an advantage where there are any."""
        if not self._config.skip_zero_advantage:
            return samples
        return [s for s in samples if any(s.advantages)] or samples

    def share(self, samples: Sequence[Sample]) -> list[tuple[list[int], TrainBatch]]:
        """This rank's micro-batches, and which samples each holds; none in a silent one."""
        settings = self._config.deepspeed
        rows = rows_of(
            samples,
            settings.micro_batch_tokens,
            packed=settings.micro_batching == "packed",
            ranks=world_size(),
        )
        shortest = min(samples, key=lambda s: len(s.scored.rollout.token_ids))
        return [
            (
                own,
                on_device(
                    collate([samples[i] for i in own]) if own else silent(collate([shortest])),
                    self._engine.device,
                ),
            )
            for own in rows[rank() :: world_size()]
        ]

    def _proximal(
        self, shares: Sequence[Sequence[tuple[list[int], TrainBatch]]]
    ) -> list[list[torch.Tensor | None]]:
        """The learner's scores at the batch's first step; a later step may need them."""
        known: list[list[torch.Tensor | None]] = [[None] * len(share) for share in shares]
        if needs_proximal(self._config.loss):
            for i, share in enumerate(shares[1:], start=1):
                known[i] = [self._score(batch).logprobs_B_T for _, batch in share]
        return known

    def _update(
        self,
        samples: Sequence[Sample],
        share: Sequence[tuple[list[int], TrainBatch]],
        proximal: Sequence[torch.Tensor | None],
        first_version: int,
        kl_coefficient: float,
        lr_scale: float,
        tightness: float,
    ) -> Update:
        """Take one optimiser step."""
        denominators = self._denominators([batch for own, batch in share if own])
        versions = StepVersions(first_version, self.learner_version)
        loss = loss_at(self._config.loss, self.learner_version, tightness)
        sums = over_ranks(
            [
                self._accumulate(batch, scores, loss, denominators, versions, kl_coefficient)
                for (_, batch), scores in zip(share, proximal, strict=True)
            ]
        )
        lr_scale *= rate_scale(sums, by_ess=self._config.optimiser.scale_by_ess)
        return Update(samples, sums, self._engine.step(lr_scale))

    def _denominators(self, batches: Sequence[TrainBatch]) -> tuple[float, float]:
        """Of the policy's and the value head's loss, over all ranks."""
        max_tokens = self._config.sampling.max_new_tokens * self._config.sampling.max_turns
        own = [
            policy_denominator(batches, self._config.loss, max_tokens),
            value_denominator(batches) if self.with_values else 0.0,
        ]
        policy, value = add_up(torch.tensor(own, dtype=torch.float64)).tolist()
        return policy, value

    def _accumulate(
        self,
        batch: TrainBatch,
        proximal: torch.Tensor | None,
        config: Loss,
        denominators: tuple[float, float],
        versions: StepVersions,
        kl_coefficient: float,
    ) -> dict[str, torch.Tensor]:
        """Add one micro-batch's gradient; gives its metric sums."""
        scores = self._engine.forward(*_inputs(batch))
        assert isinstance(scores, PolicyScores)
        policy = policy_loss(
            scores.logprobs_B_T, batch, config, denominators[0], proximal, versions=versions
        )
        loss, metrics = policy.loss, policy.metrics
        if self._measures_kl(kl_coefficient):
            reference = self.reference_logprobs(batch)
            kl = kl_loss(scores.logprobs_B_T, reference, batch, denominators[0], config.aggregation)
            metrics = metrics | kl.metrics
            if self._config.kl.placement == "loss" and kl_coefficient:
                loss = loss + kl_coefficient * kl.loss
        if scores.values_B_T is not None and isinstance(self._config.credit, TurnGaeCredit):
            value = value_loss(scores.values_B_T, batch, denominators[1])
            loss = loss + self._config.credit.value_coefficient * value.loss
            metrics = metrics | value.metrics
        self._engine.backward(loss)
        assert scores.entropy_B_T is not None
        entropy = scores.entropy_B_T.sum()
        return metrics | {"entropy_sum": entropy, "entropy_tokens_sum": batch.action_mask_B_T.sum()}

    def _measures_kl(self, kl_coefficient: float) -> bool:
        """Whether this step needs the reference: KL is trained on, steered by, or due a look."""
        kl = self._config.kl
        wanted = kl_coefficient > 0 or kl.adaptive is not None
        return wanted or self.learner_version % kl.measure_every == 0

    # -- scoring --------------------------------------------------------------------------------

    def _score(self, batch: TrainBatch) -> PolicyScores:
        scores = self._engine.score(*_inputs(batch))
        assert isinstance(scores, PolicyScores)
        return scores

    @torch.no_grad()
    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """float32, (B, T), nats: the frozen snapshot's scores of the batch's actions."""
        if self._frozen is not None:
            frozen: PolicyScores = self._frozen(*_inputs(on_device(batch, self._engine.device)))
            return frozen.logprobs_B_T
        with self._module.as_reference():
            return self._score(batch).logprobs_B_T

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """float32, (B, T): the value head everywhere."""
        values = self._score(batch).values_B_T
        assert values is not None
        return values

    def _canary_logprobs(self) -> tuple[float, ...]:
        """Scores of the canary's tokens at temperature 1, one after another."""
        ids, valid = right_padded(self._canary)
        actions = valid.clone()
        actions[:, 0] = False
        with without_dropout(self._module):
            scores = self._engine.score(ids, valid, actions, torch.ones(len(ids)))
        assert isinstance(scores, PolicyScores)
        return tuple(scores.logprobs_B_T[actions.to(scores.logprobs_B_T.device)].tolist())

    # -- publishing and saving ------------------------------------------------------------------

    def publish(self, root: Path, attempt: int) -> Receipt | None:
        """Write the present weights for the engines, see `weight_sync`; None but on rank 0."""
        logprobs = self._canary_logprobs()
        canary = Canary(self._canary, logprobs, self._published_logprobs)
        self._published_logprobs = logprobs
        tensors = trainable_tensors(self._module.model)
        if rank():
            return None
        version = PolicyVersion(attempt, self.learner_version)
        return publish(root, version, tensors, canary, keep=self._config.staleness_limit + 2)

    def save(self, folder: Path) -> dict[str, str]:
        """Write this rank's state: rank 0 the trained weights and the value head, every rank its
        optimiser. Returns the hash of each part it wrote."""
        parts = self._state()
        for name, tensors in parts.items():
            write_weights(folder / f"{name}.safetensors", tensors)
        return {name: hash_tensors(tensors) for name, tensors in parts.items()}

    def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        """Take back what the ranks wrote; returns the hash of each part this rank would write.

        Raises:
            CheckpointMismatchError: another number of ranks wrote it.
            WeightsMismatchError: a file is not whole, or of another model.
        """
        optimiser = folder / f"{_optimiser_name()}.safetensors"
        if not optimiser.exists():
            found = sorted(p.name for p in folder.glob("optimiser*.safetensors"))
            raise CheckpointMismatchError(
                f"{folder} holds {', '.join(found) or 'no optimiser'}, and rank {rank()} of "
                f"{world_size()} needs {optimiser.name}: go on with as many learner ranks "
                "(rl.runtime.learner_ranks) as wrote it"
            )
        load_trainable(self._module.model, read_weights(folder / "policy.safetensors"))
        self._engine.load_state_tensors(read_weights(optimiser), steps_taken)
        if (head := self._module.value_head) is not None:
            with whole(head.parameters(), write=True):
                copy_into(head.state_dict(), read_weights(folder / "value_head.safetensors"))
        return {name: hash_tensors(tensors) for name, tensors in self._state().items()}

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank writes, by file stem; every rank must ask."""
        shared = {"policy": trainable_tensors(self._module.model)}
        if (head := self._module.value_head) is not None:
            with whole(head.parameters()):
                shared["value_head"] = {k: v.clone() for k, v in head.state_dict().items()}
        own = {_optimiser_name(): self._engine.state_tensors()}
        return own if rank() else shared | own

    def save_policy(self, out_dir: Path) -> str | None:
        """Write the merged policy as an HF folder, and the adapter beside it; returns the hash.

        Every rank must ask; rank 0 writes, the others return None.
        """
        trained = trainable_tensors(self._module.model)
        if rank():
            return None
        if not isinstance(self._config.trainable, FullWeights):
            write_weights(out_dir / "adapter" / "weights.safetensors", trained)
        # Onto a fresh copy of the snapshot: whole there, however the weights are split here.
        model = load_model(self._snapshot, dtype=self._config.deepspeed.dtype)
        merged = attach(model, self._config.trainable, self._config.seed)
        load_trainable(merged, trained)
        return save_model(
            model, self._tokenizer, out_dir / "policy", tensors=merged_tensors(merged)
        )


def _inputs(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.token_ids_B_T, batch.valid_B_T, batch.action_mask_B_T, batch.temperature_B


def _optimiser_name() -> str:
    return "optimiser" if world_size() == 1 else f"optimiser-{rank()}-of-{world_size()}"


def _canary_sequences(rows: Sequence[Row], renderer: PromptRenderer) -> tuple[tuple[int, ...], ...]:
    sequences = []
    for row in rows[:CANARY_SEQUENCES]:
        messages = [{"role": "user", "content": row.prompt}]
        answer = {"role": "assistant", "content": row.answer}
        sequences.append(tuple(renderer.supervised([*messages, answer])[0]))
    return tuple(sequences)
