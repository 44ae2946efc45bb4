"""Second moments of what drives each matrix: Σ x xᵀ over the tokens of the policy's own rollouts.

For an error δ in one row of a matrix, δᵀ (Σ x xᵀ) δ is exactly the squared error of that row's
output over those tokens. The importance matrix is its diagonal, which takes the columns of x to be
uncorrelated.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantize.imatrix import check_rollouts, check_sums, load_float, matrix_names


def collect_moments(model_dir: Path, rollouts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Float64 (columns, columns) of every matrix in the blocks, by GGUF tensor name.

    Matrices fed by the same activations share one array.

    Raises:
        ImatrixError: no rollout, an empty one, or activations that are not finite.
    """
    import torch

    check_rollouts(rollouts)
    names = matrix_names(model_dir)
    model = load_float(model_dir)
    found: dict[str, torch.Tensor] = {}
    # inputs of the forward pass at hand, held so that no id is used twice, and who counted them
    seen: dict[int, tuple[torch.Tensor, str]] = {}

    def watch(name: str, module: Any) -> None:
        found[name] = torch.zeros(module.in_features, module.in_features, dtype=torch.float64)

        def add(_module: Any, inputs: Any) -> None:
            _, first = seen.setdefault(id(inputs[0]), (inputs[0], name))
            if first != name:
                found[name] = found[first]
                return
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            found[name] += (rows.T @ rows).double()

        module.register_forward_pre_hook(add)

    for module_name, module in model.named_modules():
        target = names.get(f"{module_name}.weight")
        if target is not None and isinstance(module, torch.nn.Linear):
            watch(target, module)
    with torch.inference_mode():
        for ids in rollouts:
            seen.clear()
            model.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    arrays = {name: sums.numpy() for name, sums in found.items()}
    check_sums(arrays)
    return arrays
