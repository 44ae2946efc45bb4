"""Fold adapters into the base weights, in float32, for a folder any Hugging Face tool can load."""

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from tasks.models.load import canonical_tensors


def merged_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Canonical tensors of the base with W + ΔW in float32; the model itself is not changed."""
    if not isinstance(model, PeftModel):
        return canonical_tensors(model)
    base = model.get_base_model()
    tensors = {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in canonical_tensors(base).items()
        if "lora_" not in name
    }
    with torch.no_grad():
        for name, layer in base.named_modules():
            if isinstance(layer, LoraLayer):
                key = f"{name}.weight"
                delta = layer.get_delta_weight(layer.active_adapters[0]).float()
                tensors[key] = (tensors[key].float() + delta).to(tensors[key].dtype)
    return tensors
