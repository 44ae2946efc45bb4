"""What runs inside vLLM's own worker process: reading the policy back from its memory.

vLLM adds `PolicyMemory` to its worker class; its methods are called by name over `collective_rpc`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tasks.artifacts.content_hash import hash_tensors
from tasks.models.weights_file import read_weights
from tasks.process_tree import die_with_parent
from tasks.sampling.vllm_cpu_adapters import use_grouped_adapters

EXTENSION = f"{__name__}.PolicyMemory"
PUBLISHED_PREFIX = "base_model.model."


class PolicyMemory:
    """Worker extension; `model_runner` is the worker's."""

    model_runner: Any

    def policy_settle(self, parent: int) -> None:
        """Use faster adapters on a CPU; end when the process that started the engine ends.

        vLLM's core would live on and keep its memory. Where it has workers of its own (several
        GPUs), those follow the core, and the core falls to the stage's reaper.
        """
        if torch.version.cuda is None:
            use_grouped_adapters()
        if os.getppid() == parent:
            die_with_parent(parent)

    def policy_adapter_hash(self, adapter_id: int, scaling: float) -> dict[str, Any]:
        """Hash of an adapter as the kernels see it, and the modules where they see another.

        vLLM folds the scaling into B; taken out again it is exact, for it is a power of two.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(adapter_id)
        loaded = manager.get_adapter(adapter_id)
        tensors: dict[str, torch.Tensor] = {}
        differs: list[str] = []
        for name, module in manager.modules.items():
            weights = loaded.get_lora(name)
            parts = manager.packed_modules.get(name, [name])
            if not _holds(module, slot, weights):
                differs.append(name)
            if weights is None:
                continue
            for part, a, b in zip(parts, _each(weights.lora_a), _each(weights.lora_b), strict=True):
                if a is not None:
                    tensors[f"{PUBLISHED_PREFIX}{part}.lora_A.weight"] = a
                    tensors[f"{PUBLISHED_PREFIX}{part}.lora_B.weight"] = b / scaling
        return {"sha256": hash_tensors(tensors), "differs": differs}

    def policy_load_weights(self, path: str) -> None:
        """Replace every weight of the model in place."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        self.model_runner.reload_weights(weights_iterator=iter(read_weights(Path(path)).items()))
        for module in self.model_runner.get_model().modules():
            # a head tied to the embedding is no tensor of the file, so vLLM leaves it packed as it
            # was: its logits would be the old policy's
            if hasattr(module, "cpu_linear") and module.weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def policy_weights_hash(self) -> dict[str, Any]:
        """Hash of every weight under its name outside vLLM."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        model = self.model_runner.get_model()
        packed = getattr(model, "packed_modules_mapping", {})
        tensors: dict[str, torch.Tensor] = {}
        differs: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, VocabParallelEmbedding):
                rows = module.weight[: module.org_vocab_size]
                if not (name == "lm_head" and model.config.tie_word_embeddings):
                    tensors[f"{name}.weight"] = rows
                if not torch.equal(_multiplied(module)[: module.org_vocab_size], rows):
                    differs.append(name)
            elif isinstance(module, LinearBase):
                tensors |= _split(name, module, packed)
            else:
                for own, parameter in module.named_parameters(recurse=False):
                    tensors[f"{name}.{own}"] = parameter
        return {"sha256": hash_tensors(tensors), "differs": differs}


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _holds(module: Any, slot: int, weights: Any) -> bool:
    """Whether the buffers the kernels read hold exactly these weights, and nothing beside them."""
    for which in ("a", "b"):
        buffers = getattr(module, f"lora_{which}_stacked")
        buffers = buffers if isinstance(buffers, tuple) else (buffers,)
        if weights is None:
            wanted: list[Any] = [None] * len(buffers)
        else:
            full = getattr(weights, f"lora_{which}")
            sliced = getattr(module, f"slice_lora_{which}")(full) if module.tp_size > 1 else full
            wanted = _each(sliced)
        for buffer, tensor in zip(buffers, wanted, strict=True):
            held = buffer[slot].squeeze(0)
            expected = torch.zeros_like(held)
            if tensor is not None:
                expected[: tensor.shape[0], : tensor.shape[1]] = tensor.to(held.device)
            if not torch.equal(expected, held):
                return False
    return True


def _multiplied(module: Any) -> torch.Tensor:
    """The weight (out, in) a linear layer multiplies by.

    The CPU build packs weights in a form nobody else can read and drops the original; the identity
    sent through the kernel gives it back, exactly: each sum has one term.
    """
    kernel = getattr(module, "cpu_linear", None)
    if kernel is None:
        return module.weight
    width = module.input_size if hasattr(module, "input_size") else module.embedding_dim
    identity = torch.eye(width, dtype=module.weight.dtype)
    return kernel(identity, module.weight, None).t()


def _split(name: str, module: Any, packed: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    """The published tensors of one linear layer, which vLLM may have merged of several."""
    parent, _, own = name.rpartition(".")
    parts = packed.get(own, [own])
    weight, bias = _multiplied(module), getattr(module, "bias", None)
    sizes = getattr(module, "output_sizes", None) or [weight.shape[0]]
    tensors: dict[str, torch.Tensor] = {}
    for part, rows, shift in _zip_parts(parts, sizes, weight, bias):
        tensors[f"{parent}.{part}.weight"] = rows
        if shift is not None:
            tensors[f"{parent}.{part}.bias"] = shift
    return tensors


def _zip_parts(
    parts: list[str], sizes: list[int], weight: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    shifts = bias.to(weight.dtype).split(sizes) if bias is not None else [None] * len(sizes)
    yield from zip(parts, weight.split(sizes), shifts, strict=True)
