"""The published policies a vLLM engine holds: adapter folders, fresh names, users counted."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.schema.training import Lora
from tasks.artifacts.atomic import write_json
from tasks.artifacts.content_hash import hash_tensors
from tasks.models.errors import WeightsMismatchError
from tasks.models.weights_file import read_weights, write_weights
from tasks.sampling.errors import AnswerRefusedError
from tasks.sampling.types import PolicyVersion

_NAME = re.compile(
    r"base_model\.model\.(?P<module>.*\.(?P<target>\w+))\.lora_(?P<side>[AB])\.weight"
)


class PolicyGoneError(AnswerRefusedError):
    """A turn asks for a version the engine no longer holds."""


@dataclass
class HeldPolicy:
    """One version an engine can sample from."""

    version: PolicyVersion
    name: str
    """Fresh for every publish: vLLM and its caches know adapters by name."""
    adapter_id: int = 0
    """vLLM's number of the adapter; 0 = the model alone."""
    folder: Path | None = None
    users: int = 0
    """Turns being sampled from it."""


def policy_name(version: PolicyVersion, sha256: str) -> str:
    """`policy-<attempt>-<step>-<hash>`: no two publishes share one."""
    return f"policy-{version.attempt}-{version.step}-{sha256[:8]}"


class Shelf:
    """The newest `keep` versions, and older ones while somebody uses them; no I/O."""

    def __init__(self, first: HeldPolicy, keep: int) -> None:
        self._held = [first]
        self._keep = keep

    @property
    def newest(self) -> HeldPolicy:
        """What a turn without a wish is sampled from."""
        return self._held[-1]

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Oldest first."""
        return tuple(held.version for held in self._held)

    def put(self, held: HeldPolicy) -> None:
        """Make it the newest."""
        self._held.append(held)

    def take(self, version: PolicyVersion | None) -> HeldPolicy:
        """The version asked for, or the newest, and count its user.

        Raises:
            PolicyGoneError: it is not held any more.
        """
        chosen = self.newest
        if version is not None:
            matching = [held for held in self._held if held.version == version]
            if not matching:
                raise PolicyGoneError(
                    f"version {tuple(version)} is asked for, held are "
                    f"{[tuple(v) for v in self.versions]}; the episode outlived them"
                )
            chosen = matching[-1]
        chosen.users += 1
        return chosen

    def give_back(self, held: HeldPolicy) -> None:
        """One user fewer."""
        held.users -= 1

    def retire(self) -> list[HeldPolicy]:
        """Take out, and return, what is older than the newest `keep` and used by nobody."""
        old = [held for held in self._held[: -self._keep] if held.users == 0]
        self._held = [held for held in self._held if held not in old]
        return old


def layers_of(snapshot: Path) -> int:
    """Hidden layers of the model in a folder."""
    layers: int = json.loads((snapshot / "config.json").read_text())["num_hidden_layers"]
    return layers


def write_adapter(weights: Path, lora: Lora, layers: int) -> tuple[Path, str]:
    """Make the folder PEFT and vLLM read out of published weights; gives it and the weights' hash.

    It lies in the publish itself and goes when that goes. Its config comes last: a folder that has
    one is whole.

    Raises:
        WeightsMismatchError: a name, rank, module or layer is not what the config trains, or the
            file is not whole.
    """
    tensors = read_weights(weights)
    check_adapter(tensors, lora, layers)
    folder = weights.parent / "adapter"
    if not (folder / "adapter_config.json").exists():
        write_weights(folder / "adapter_model.safetensors", tensors)
        write_json(
            folder / "adapter_config.json",
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": lora.r,
                "lora_alpha": lora.alpha,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": sorted(lora.targets),
            },
        )
    return folder, hash_tensors(tensors)


def check_adapter(tensors: dict[str, torch.Tensor], lora: Lora, layers: int) -> None:
    """Refuse what is not the adapter the config trains; vLLM would load parts of it silently."""
    seen: set[tuple[str, str]] = set()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match["target"] not in lora.targets:
            raise WeightsMismatchError(
                f"published tensor {name} belongs to no adapter on rl.trainable.targets="
                f"{list(lora.targets)}"
            )
        shape = tuple(tensor.shape)
        rank = shape[0 if match["side"] == "A" else 1] if len(shape) == 2 else "of no matrix"
        if rank != lora.r:
            raise WeightsMismatchError(
                f"{name} has shape {shape}: rank {rank}, rl.trainable.r={lora.r} was expected; "
                "publish with the config the engine was started with"
            )
        seen.add((match["module"], match["side"]))
    expected = 2 * layers * len(lora.targets)
    if len(seen) != expected:
        raise WeightsMismatchError(
            f"the adapter has {len(seen)} tensors; {layers} layers with targets "
            f"{list(lora.targets)} make {expected}"
        )
