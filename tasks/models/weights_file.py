"""Weights in a safetensors file: written whole or not at all, read though it may be damaged."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tasks.artifacts.atomic import write_atomic
from tasks.models.errors import WeightsMismatchError


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, wherever they are; folders above are made."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_atomic(path, save(plain))


def read_weights(
    path: Path, remedy: str = "resume: the weights are written again"
) -> dict[str, torch.Tensor]:
    """The tensors of a file; `remedy` tells what to do where it is none.

    Raises:
        WeightsMismatchError: it is missing, cut off, or no safetensors file.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsMismatchError(
            f"{path} is not a whole safetensors file: {error}; it is damaged or was never "
            f"finished; {remedy}"
        ) from error
