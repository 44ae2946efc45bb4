"""Fold adapters into the base weights, in float32, for a folder any Hugging Face tool can load."""

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from tasks.models.load import canonical_tensors


def merged_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Canonical tensors with W + ΔW, all float32 whatever the model trains in: merged once, not
    rounded, so a small ΔW is not lost beside a large W. The model itself is not changed."""
    if not isinstance(model, PeftModel):
        return {name: tensor.float() for name, tensor in canonical_tensors(model).items()}
    base = model.get_base_model()
    tensors = {
        name.replace(".base_layer.", "."): tensor.detach().float()
        for name, tensor in canonical_tensors(base).items()
        if "lora_" not in name
    }
    with torch.no_grad():
        for name, layer in base.named_modules():
            if isinstance(layer, LoraLayer):
                key = f"{name}.weight"
                tensors[key] = (
                    tensors[key] + layer.get_delta_weight(layer.active_adapters[0]).float()
                )
    return tensors
