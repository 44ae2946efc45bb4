"""A linear layer with a LoRA adapter that multiplies once: by the merged weight.

PEFT multiplies a layer's input by the base weight and, apart from that, by the adapter's two small
matrices; on a CPU these skinny products and the sums of their results cost half as much again as
the layer itself. Here W' = W + s·B·A is made first, which takes few operations where tokens are
many. Backward the adapter's gradients go through its r dimensions all the same, so no gradient of
W' is ever made.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch.autograd.function import FunctionCtx, once_differentiable

__all__ = ["MergedLoraLinear", "merged_once", "multiply_merged"]


class MergedLoraLinear(Linear):
    """PEFT's layer; `forward` multiplies by W' where that is the same and takes fewer operations.

    It is not the same in bfloat16, where W' would round small adapters away; under dropout; and
    where several adapters add up. There, and where ZeRO 3 has split the weights, PEFT's own forward
    runs.
    """

    kept: torch.Tensor | None = None
    """W' as `merged_once` made it."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(…, in) → (…, out)."""
        base = self.get_base_layer()
        if self.kept is not None and not self.disable_adapters:
            return torch.nn.functional.linear(x, self.kept, base.bias)
        if args or kwargs or x.dtype != torch.float32 or (parts := self.one_adapter()) is None:
            return super().forward(x, *args, **kwargs)
        wide, narrow = base.weight.shape
        if wide * narrow >= x.numel() // narrow * (wide + narrow):  # B·A costs more than B·(A·x)
            return super().forward(x)
        y = _MergedProduct.apply(x.flatten(0, -2), base.weight, *parts).unflatten(0, x.shape[:-1])
        return y if base.bias is None else y + base.bias

    def one_adapter(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """A (r, in), B (out, r) and s of the only adapter that is on; None where W' is not the
        same."""
        name = self.active_adapters[0] if len(self.active_adapters) == 1 else None
        if self.disable_adapters or self.merged or name not in self.lora_A:
            return None
        small, large = self.lora_A[name].weight, self.lora_B[name].weight
        weights = (self.get_base_layer().weight, small, large)
        if any(w.dtype != torch.float32 or hasattr(w, "ds_id") for w in weights):
            return None
        drops = self.training and not isinstance(self.lora_dropout[name], torch.nn.Identity)
        return None if drops or name in self.lora_variant else (small, large, self.scaling[name])


@contextmanager
def merged_once(model: torch.nn.Module) -> Iterator[None]:
    """Make every W' once for all that runs inside, without a gradient, where adapters stay as they
    are meanwhile: decoding, which multiplies a few rows many times. Costs a copy of these weights.
    """
    layers = [module for module in model.modules() if isinstance(module, MergedLoraLinear)]
    try:
        with torch.no_grad():
            for layer in layers:
                if parts := layer.one_adapter():
                    layer.kept = _merged(layer.get_base_layer().weight, *parts)
        yield
    finally:
        for layer in layers:
            layer.kept = None


def multiply_merged(config: LoraConfig) -> LoraConfig:
    """Have PEFT build its linear layers as `MergedLoraLinear`."""
    config._register_custom_module({torch.nn.Linear: MergedLoraLinear})
    return config


def _merged(
    weight: torch.Tensor, small: torch.Tensor, large: torch.Tensor, scale: float
) -> torch.Tensor:
    return torch.addmm(weight, large, small, alpha=scale)


class _MergedProduct(torch.autograd.Function):
    """x·(W + s·B·A)ᵀ for x (N, in), W (out, in), A (r, in), B (out, r); W gets no gradient."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        small: torch.Tensor,
        large: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        merged = _merged(weight, small, large, scale)
        ctx.save_for_backward(x, merged, small, large)
        ctx.scale = scale
        return x @ merged.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, merged, small, large = ctx.saved_tensors
        grad_r = (grad @ large).mul_(ctx.scale)
        grad_small = grad_r.T @ x
        grad_large = grad.T @ (x @ small.T).mul_(ctx.scale)
        return (
            grad @ merged if ctx.needs_input_grad[0] else None,
            None,
            grad_small,
            grad_large,
            None,
        )
