"""The importance matrix weighted by what each token does to the policy's own choices.

To second order the KL of a perturbed matrix is ½ Σ (g·δ)², with δ the error it adds to its output
and g = ∂ log p(sampled token) / ∂ output: rollouts sampled from the policy itself make g² the
Fisher information, which text from elsewhere cannot. So the weight of column j is the mean of
‖g‖² x_j², and a token whose successor the policy is certain of anyway counts for little.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantize.errors import ImatrixError
from quantize.imatrix import ImportanceMatrix, check_rollouts, check_sums, load_float, matrix_names
from quantize.parity import action_rows
from quantize.rollouts import RolloutTokens

if TYPE_CHECKING:
    import torch


def collect_by_gradient(
    model_dir: Path,
    rollouts: Sequence[RolloutTokens],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    head: bool = False,
) -> ImportanceMatrix:
    """Σ ‖g‖² x² of every matrix in the blocks, scaled so that a token's mean weight is 1.

    One backward pass for each rollout, through activations only. A matrix whose output changes
    nothing (all gradients 0) has no entry.

    Raises:
        ImatrixError: no rollout, an empty one, none with a sampled token, or sums not finite.
    """
    import torch

    check_rollouts([r.token_ids for r in rollouts])
    names = matrix_names(model_dir, head=head)
    model = load_float(model_dir).requires_grad_(False)
    tallies: dict[str, _Tally] = {}
    for module_name, module in model.named_modules():
        target = names.get(f"{module_name}.weight")
        if target is not None and isinstance(module, torch.nn.Linear):
            tallies[target] = _Tally(module.in_features)
            module.register_forward_hook(tallies[target].watch)
    used = 0
    for done, rollout in enumerate(rollouts, start=1):
        used += _backward(model, rollout)
        if on_progress is not None:
            on_progress(done, len(rollouts))
    if not used:
        raise ImatrixError("no rollout has a sampled token; check the action_mask")
    check_sums({name: np.append(tally.sums, tally.weight) for name, tally in tallies.items()})
    known = {name: tally for name, tally in tallies.items() if tally.weight > 0}
    sums = {name: tally.sums / tally.weight * tally.tokens for name, tally in known.items()}
    return ImportanceMatrix(sums, {n: t.tokens for n, t in known.items()}, used)


class _Tally:
    """What one matrix has seen: Σ w x² over tokens, Σ w, and how many tokens; w = ‖g‖²."""

    def __init__(self, columns: int) -> None:
        self.sums = np.zeros(columns)
        self.weight = 0.0
        self.tokens = 0

    def watch(self, _module: Any, inputs: Any, output: "torch.Tensor") -> None:
        """A forward hook: keeps the inputs until the gradient of the output arrives."""
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])

        def add(gradient: "torch.Tensor") -> None:
            weights = gradient.reshape(len(rows), -1).double().square().sum(-1)
            self.sums += (weights @ rows.double().square()).numpy()
            self.weight += float(weights.sum())
            self.tokens += len(rows)

        output.register_hook(add)


def _backward(model: Any, rollout: RolloutTokens) -> bool:
    """Differentiate Σ log p of the sampled tokens; False where there is none."""
    import torch

    predicts = action_rows(rollout.token_ids, rollout.action_mask)[:-1]
    if not predicts.any():
        return False
    ids = torch.tensor([list(rollout.token_ids)])
    # weights are frozen: the graph begins at the embeddings
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits.float(), dim=-1)
    chosen = logp.gather(1, ids[0, 1:, None])[:, 0]
    chosen[torch.from_numpy(predicts)].sum().backward()
    return True
