"""Fold adapters into the base weights, in float32, for a folder any Hugging Face tool can load.

An adapter on one side of tied embeddings must not change the other: sharing is broken before the
merge, and the two sides are compared after it. They are kept once where they are still equal (A19).
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from tasks.models.errors import NonFiniteWeightError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def merged_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The merged float32 tensors of a live model with adapters (or without), which is not touched.

    Float32 whatever the model trains in: merged once, not rounded, so that a small ΔW is not lost
    beside a large W. The head is among the tensors only where it differs from the embedding, or
    the model never tied them: `HEAD not in tensors` is what `tie_word_embeddings` must say.

    Raises:
        NonFiniteWeightError: names the tensor.
    """
    clones = {
        id(p): torch.nn.Parameter(p.detach().float().cpu().clone(), requires_grad=False)
        for p in model.parameters()
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of what `_untie` has made right
        twin: Any = copy.deepcopy(model, memo=dict(clones))
        was_tied = _is_tied(twin)
        _untie(twin)
        merged = twin.merge_and_unload() if hasattr(twin, "merge_and_unload") else twin
        tensors = {n: t.detach().contiguous() for n, t in merged.state_dict().items()}
    check_finite(tensors)
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if was_tied and head is not None and embedding is not None and torch.equal(head, embedding):
        del tensors[HEAD]
    return tensors


def _is_tied(model: Any) -> bool:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return bool(base.config.tie_word_embeddings)


def _untie(model: torch.nn.Module) -> None:
    """Give every module its own copy of a parameter it shares with another."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.data_ptr() in seen and parameter.numel():
                clone = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
                setattr(module, name, clone)
            else:
                seen.add(parameter.data_ptr())


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise NonFiniteWeightError naming the first tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        finite = tensor.isfinite()
        if not bool(finite.all()):
            rows = (~finite).reshape(finite.shape[0], -1).any(1).nonzero().flatten().tolist()
            raise NonFiniteWeightError(
                f"{name} holds NaN or infinity in {len(rows)} of {finite.shape[0]} rows (first "
                f"{rows[:5]}); if these are rows of new tokens, save the embeddings with the "
                "adapter; else go back to an earlier checkpoint"
            )
