"""Weights read from a safetensors file that may be damaged."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tasks.models.errors import WeightsMismatchError


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file.

    Raises:
        WeightsMismatchError: it is missing, cut off, or no safetensors file.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsMismatchError(
            f"{path} is not a whole safetensors file: {error}; it is damaged or was never "
            "finished. Resume: the weights are written again"
        ) from error
