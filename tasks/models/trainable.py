"""What is trained: adapters or every weight; published, loaded back, hashed, and switched off."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from configs.schema.training import FullWeights, Lora
from tasks.models.errors import WeightsMismatchError
from tasks.models.load import canonical_tensors
from tasks.models.lora_layer import multiply_merged
from tasks.models.ranks import whole

ADAPTER = "default"
REFERENCE = "reference"


def attach(model: PreTrainedModel, trainable: Lora | FullWeights, seed: int) -> torch.nn.Module:
    """The model ready for training: every weight, or adapters that start as the identity."""
    if isinstance(trainable, FullWeights):
        return model.requires_grad_(True)
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    unknown = sorted(set(trainable.targets) - linear)
    if unknown:
        raise WeightsMismatchError(
            f"trainable.targets={unknown} match no linear layer of this model; choose from "
            f"{sorted(linear)}"
        )
    config = LoraConfig(
        r=trainable.r,
        lora_alpha=trainable.alpha,
        lora_dropout=trainable.dropout,
        target_modules=list(trainable.targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In the model's own dtype, as DeepSpeed trains it: the sampler's copy must hash the same.
        return get_peft_model(model, multiply_merged(config), autocast_adapter_dtype=False)


def trainable_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights a publish carries, by canonical name: the adapter's, or all of them.

    Views of the model's own; copies where ZeRO 3 has split it, and then every rank must ask.
    """
    carried = [p for _, p in _carried(model)]
    with whole(carried):
        tensors = _views(model)
        split = any(hasattr(p, "ds_id") for p in carried)
        return {name: t.clone() for name, t in tensors.items()} if split else tensors


def _carried(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    if not isinstance(model, PeftModel):
        return list(model.named_parameters())
    marker = f".{ADAPTER}."
    return [(n, p) for n, p in model.named_parameters() if "lora_" in n and marker in n]


def _views(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    if not isinstance(model, PeftModel):
        return canonical_tensors(model)
    return {name.replace(f".{ADAPTER}.", "."): p.detach() for name, p in _carried(model)}


def load_trainable(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy published weights into a model of the same shape.

    Raises:
        WeightsMismatchError: names, or shapes, differ (an adapter of another rank, say).
    """
    with whole([p for _, p in _carried(model)], write=True):
        copy_into(_views(model), tensors)


def copy_into(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a module's own by name.

    Raises:
        WeightsMismatchError: names or shapes differ; nothing is copied where names do.
    """
    if set(own) != set(tensors):
        different = sorted(set(own) ^ set(tensors))[:4]
        raise WeightsMismatchError(
            f"published weights differ in names from this model: {different}; expected exactly its "
            f"{len(own)}: were they made with other trainable.targets?"
        )
    with torch.no_grad():
        for name, target in own.items():
            source = tensors[name]
            if source.shape != target.shape:
                raise WeightsMismatchError(
                    f"{name} has shape {tuple(source.shape)}, this model {tuple(target.shape)}; "
                    "was the adapter made with another rank?"
                )
            target.copy_(source)


def freeze_reference(model: torch.nn.Module) -> None:
    """Keep the adapter's present weights as the reference when a trained adapter goes on (A05).

    A fresh adapter (B = 0) needs no copy: switched off, it is the base.
    """
    if not isinstance(model, PeftModel) or REFERENCE in model.peft_config:
        return
    start = trainable_tensors(model)
    if all(not t.any() for name, t in start.items() if "lora_B" in name):
        return
    model.add_adapter(REFERENCE, model.peft_config[ADAPTER])
    marker = f".{REFERENCE}."
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if marker in name:
                parameter.copy_(start[name.replace(marker, ".")])
                parameter.requires_grad_(False)
    model.set_adapter(ADAPTER)


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside, where dropout makes it another; else nothing is done, for turning all
    modules over twice takes as long as scoring a few sequences."""
    if not (model.training and any(_drops(module) for module in model.modules())):
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


def _drops(module: torch.nn.Module) -> bool:
    config = getattr(module, "config", None)
    own = isinstance(module, torch.nn.Dropout) and module.p > 0
    return own or float(getattr(config, "attention_dropout", 0.0) or 0.0) > 0


@contextmanager
def reference_weights(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model as the frozen reference: no gradient, no dropout, adapters back on afterwards.

    Full-parameter training has no reference inside the model: pass a frozen copy instead.
    """
    if not isinstance(model, PeftModel):
        raise WeightsMismatchError("full-parameter training needs a frozen copy as its reference")
    try:
        with torch.no_grad(), without_dropout(model):
            if REFERENCE in model.peft_config:
                model.base_model.set_adapter(REFERENCE, inference_mode=True)
                yield model
            else:
                with model.disable_adapter():
                    yield model
    finally:
        if REFERENCE in model.peft_config:
            model.base_model.set_adapter(ADAPTER)
