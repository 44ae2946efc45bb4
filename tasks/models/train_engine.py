"""The DeepSpeed wrapper that SFT and RL share: accumulate, guard, step, checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from configs.schema.training import DeepSpeedSettings, Optimiser
from tasks.models.errors import NonFiniteStepError, WeightsMismatchError
from tasks.models.ranks import RankGroup, add_gradients, join, world_size

__all__ = ["RankGroup", "StepStats", "TrainEngine", "learning_rate"]

MASTER = "master"
"""Name of a parameter's float32 original among its optimiser state."""


@dataclass(frozen=True)
class StepStats:
    """What one optimiser step did."""

    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    skipped: bool
    """True = a non-finite gradient; the weights did not move."""


def learning_rate(optimiser: Optimiser, step: int, total_steps: int) -> float:
    """Linear warm-up, then constant, or linear down to a tenth of `lr` at `total_steps`."""
    if step < optimiser.warmup_steps:
        return optimiser.lr * (step + 1) / (optimiser.warmup_steps + 1)
    if optimiser.decay == "constant":
        return optimiser.lr
    span = max(1, total_steps - 1 - optimiser.warmup_steps)
    progress = min(1.0, (step - optimiser.warmup_steps) / span)
    return optimiser.lr * (1 - 0.9 * progress)


class TrainEngine:
    """AdamW under DeepSpeed. `step` moves the weights once, over all `backward` calls since.

    With several ranks every one makes the same calls, as many of them, on its own share of a batch;
    gradients add up over ranks, so a loss has the denominator of the whole batch.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimiser: Optimiser,
        settings: DeepSpeedSettings,
        *,
        total_steps: int,
        group: RankGroup | None = None,
    ) -> None:
        import deepspeed

        join(group)
        self._optimiser = optimiser
        self._total_steps = total_steps
        self._sharded = settings.zero_stage > 0
        self._splits_weights = settings.zero_stage == 3
        self._trained = [p for p in module.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(
            self._trained,
            lr=optimiser.lr,
            betas=optimiser.betas,
            weight_decay=optimiser.weight_decay,
            fused=not self._sharded,
        )
        self._engine, self._ds_optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=adamw, config=_deepspeed_config(optimiser, settings)
        )
        # DeepSpeed averages over ranks inside its step. Without ZeRO the norm is needed before
        # that, so gradients are added up here instead.
        self._engine.enable_backward_allreduce = self._sharded
        self._loss_scale = world_size() if self._sharded else 1
        self._base_optimizer = adamw
        self.module = module
        self.steps_taken = 0
        self.skipped_steps = 0
        self._skipped_in_a_row = 0

    @property
    def device(self) -> torch.device:
        """Where the module is, and its inputs have to be."""
        return self._engine.device

    def forward(self, *args: torch.Tensor) -> object:
        """Run the module through DeepSpeed's hooks."""
        return self._engine(*(x.to(self.device) for x in args))

    @torch.no_grad()
    def score(self, *args: torch.Tensor) -> object:
        """Run the module without a gradient; hooks only where they bring split weights."""
        module = self._engine if self._splits_weights else self.module
        return module(*(x.to(self.device) for x in args))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss that already has its global denominator.

        Where the loss is not finite the gradient is not either: a clamp alone would give a NaN a
        gradient of 0, and the step would be taken.
        """
        seen = torch.full_like(loss.detach(), self._loss_scale)
        factor = seen.masked_fill(~loss.detach().isfinite(), math.nan)
        self._engine.backward(loss * factor, scale_wrt_gas=False)

    def step(self, lr_scale: float = 1.0) -> StepStats:
        """Clip and move the weights, unless the gradient is not finite (A07).

        The learning-rate schedule counts steps taken: a skipped step does not advance it.
        `lr_scale` multiplies its rate for this step.

        Raises:
            NonFiniteStepError: `max_skipped_in_a_row` skipped steps one after another.
        """
        lr = lr_scale * learning_rate(self._optimiser, self.steps_taken, self._total_steps)
        for group in self._base_optimizer.param_groups:
            group["lr"] = lr
        norm = self._grad_norm()
        if not self._sharded and not math.isfinite(norm):
            self._engine.zero_grad()
            return self._skip(norm, lr)
        self._engine.step()
        if self._sharded:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
            if not self._engine._step_applied or not math.isfinite(norm):
                return self._skip(math.nan if math.isfinite(norm) else norm, lr)
        self.steps_taken += 1
        self._skipped_in_a_row = 0
        return StepStats(norm, lr, skipped=False)

    def _grad_norm(self) -> float:
        if self._sharded:
            return 0.0  # DeepSpeed clips and reports the norm itself
        add_gradients(self._trained)
        return float(torch.nn.utils.clip_grad_norm_(self._trained, self._optimiser.grad_clip))

    def _skip(self, norm: float, lr: float) -> StepStats:
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._optimiser.max_skipped_in_a_row:
            raise NonFiniteStepError(
                f"{self._skipped_in_a_row} optimiser steps in a row had a non-finite gradient "
                f"(norm {norm}); lower the learning rate (now {lr:g}) or the clip, and resume from "
                "the last checkpoint"
            )
        return StepStats(norm, lr, skipped=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Optimiser state of this rank, by parameter position; safe to write as safetensors.

        With bfloat16 weights it holds the float32 masters too: weights rounded from them are not
        enough to go on from, and an engine left with its first masters would undo the training.
        """
        trained = {id(parameter) for parameter in self._trained}
        tensors: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(self._optimised()):
            if id(parameter) not in trained:
                tensors[f"{index}.{MASTER}"] = parameter.detach().clone()
            for name, value in self._base_optimizer.state.get(parameter, {}).items():
                tensors[f"{index}.{name}"] = torch.as_tensor(value).detach().clone()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], steps_taken: int) -> None:
        """Put optimiser state back.

        Raises:
            WeightsMismatchError: a tensor does not fit the parameter at its position.
        """
        parameters = self._optimised()
        for key, value in tensors.items():
            index, _, name = key.partition(".")
            known = name and index.isdecimal() and int(index) < len(parameters)
            parameter = parameters[int(index)] if known else None
            if parameter is None or (value.dim() and value.shape != parameter.shape):
                raise WeightsMismatchError(
                    f"optimiser state {key} of shape {tuple(value.shape)} does not fit this model "
                    f"of {len(parameters)} parameters; it is of another model: resume with the "
                    "config that wrote it"
                )
            if name == MASTER:
                parameter.data.copy_(value)
            else:
                counts = name == "step" and self._sharded  # kept on the CPU unless fused
                device = torch.device("cpu") if counts else parameter.device
                self._base_optimizer.state[parameter][name] = value.to(device, copy=True)
        self.steps_taken = steps_taken

    def _optimised(self) -> list[torch.Tensor]:
        if self._splits_weights:
            return list(self._ds_optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._base_optimizer.param_groups for p in group["params"]]


def _deepspeed_config(optimiser: Optimiser, settings: DeepSpeedSettings) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optimiser.grad_clip if settings.zero_stage else 0.0,
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
