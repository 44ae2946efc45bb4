"""The importance matrix: how strongly the policy's own rollouts drive each column of each matrix.

For a matrix applied to inputs x, the weight of column j is the mean of x_j² over all tokens; a
quantiser then spends its precision where activations are large (llama.cpp, tools/imatrix).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantize.architecture import read_shape
from quantize.errors import ImatrixError
from quantize.files import replacing

if TYPE_CHECKING:
    import torch

SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class ImportanceMatrix:
    """`sums[name]`: Σ x² over tokens, float64 (columns,); `counts[name]`: how many tokens."""

    sums: dict[str, np.ndarray]
    counts: dict[str, int]
    rollouts: int

    def means(self) -> dict[str, np.ndarray]:
        """Mean x² per column, float32, by GGUF tensor name."""
        return {n: (s / self.counts[n]).astype(np.float32) for n, s in self.sums.items()}


def collect(
    model_dir: Path,
    rollouts: Sequence[Sequence[int]],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    counted: Sequence[np.ndarray] | None = None,
    head: bool = False,
) -> ImportanceMatrix:
    """Run the float32 model over token ids and gather Σ x² of every matrix in its blocks.

    Every position passes through every matrix, so the last block counts as many tokens as the
    first. `counted` (bool, one array of a rollout's length each) leaves tokens out of the sums,
    not out of the context. With `head` the output matrix has an entry too, under the name of the
    embedding where the two are one; llama.cpp's tool leaves it out.

    Raises:
        ImatrixError: no rollout, an empty one, no token that counts, `counted` that does not fit,
            or activations that are not finite.
    """
    import torch

    check_rollouts(rollouts)
    keeps = [torch.from_numpy(k) for k in _counted(rollouts, counted)]
    names = matrix_names(model_dir, head=head)
    model = load_float(model_dir)
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    handles = []
    current: list[torch.Tensor] = []  # which tokens of the rollout at hand count
    for module_name, module in model.named_modules():
        target = names.get(f"{module_name}.weight")
        if target is None or not isinstance(module, torch.nn.Linear):
            continue
        sums[target] = torch.zeros(module.in_features, dtype=torch.float64)
        counts[target] = 0
        handles.append(module.register_forward_pre_hook(_adder(target, sums, counts, current)))
    # the head is run only where it is to be counted: it is the largest matrix of a small model
    forward = model if head else model.model
    with torch.inference_mode():
        for done, (ids, keep) in enumerate(zip(rollouts, keeps, strict=True), start=1):
            current[:] = [keep]
            forward(input_ids=torch.tensor([list(ids)]), use_cache=False)
            if on_progress is not None:
                on_progress(done, len(rollouts))
    for handle in handles:
        handle.remove()
    arrays = {n: s.numpy() for n, s in sums.items()}
    check_sums(arrays)
    return ImportanceMatrix(arrays, counts, len(rollouts))


def _adder(
    name: str,
    sums: "dict[str, torch.Tensor]",
    counts: dict[str, int],
    current: "list[torch.Tensor]",
) -> Callable[[Any, Any], None]:
    """A hook that adds x² of one matrix's inputs, summed over the tokens that count."""

    def add(_module: Any, inputs: Any) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])[current[0]].double()
        sums[name] += rows.square().sum(0)
        counts[name] += rows.shape[0]

    return add


def load_float(model_dir: Path) -> Any:
    """The model in float32, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(model_dir), dtype=torch.float32, use_safetensors=True, local_files_only=True
    ).eval()


def check_rollouts(rollouts: Sequence[Sequence[int]]) -> None:
    """Raise `ImatrixError` unless there are rollouts and each has a token."""
    if not rollouts:
        raise ImatrixError("no rollouts for the importance matrix; expected at least one")
    empty = next((i for i, ids in enumerate(rollouts) if not len(ids)), None)
    if empty is not None:
        raise ImatrixError(f"rollout {empty} for the importance matrix has no tokens")


def _counted(
    rollouts: Sequence[Sequence[int]], counted: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """Bool (T,) for each rollout; all True where nothing is said."""
    if counted is None:
        return [np.ones(len(ids), bool) for ids in rollouts]
    lengths = [len(ids) for ids in rollouts]
    if [len(keep) for keep in counted] != lengths:
        raise ImatrixError(
            f"counted speaks of {len(counted)} rollouts, with {[len(k) for k in counted][:4]}… "
            f"tokens; expected {len(rollouts)}, with {lengths[:4]}…"
        )
    if not any(np.any(keep) for keep in counted):
        raise ImatrixError("no token counts for the importance matrix; check the action_mask")
    return [np.asarray(keep, bool) for keep in counted]


def check_sums(sums: dict[str, np.ndarray]) -> None:
    """Raise `ImatrixError` for a sum that is not finite."""
    for name, values in sums.items():
        if not np.isfinite(values).all():
            raise ImatrixError(
                f"activations before {name} are not finite; the model must not ship as it is"
            )


def matrix_names(model_dir: Path, *, head: bool = False) -> dict[str, str]:
    """HF name → GGUF name of every weight inside a block, and of the head where asked for."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    shape = read_shape(model_dir)
    arch = next(a for a, n in MODEL_ARCH_NAMES.items() if n == shape.architecture.gguf_name)
    table = get_tensor_name_map(arch, shape.blocks)
    found: dict[str, str] = {}
    for source in table.mapping:
        target = table.get_name(source)
        if target is not None and target.startswith("blk."):
            found[f"{source}.weight"] = f"{target}.weight"
    if head:
        found["lm_head.weight"] = "token_embd.weight" if shape.tied else "output.weight"
    return found


def write_imatrix(matrix: ImportanceMatrix, path: Path, dataset: str) -> None:
    """Write the file in the form llama.cpp's tools read."""
    from gguf import GGUFWriter

    with replacing(path) as temporary:
        writer = GGUFWriter(temporary, "imatrix")
        try:
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", [dataset])
            writer.add_uint32("imatrix.chunk_count", matrix.rollouts)
            tokens = max(matrix.counts.values())
            writer.add_uint32("imatrix.chunk_size", max(1, tokens // matrix.rollouts))
            for name in sorted(matrix.sums):
                sums = matrix.sums[name].astype(np.float32)[None]
                writer.add_tensor(name + SUMS, sums)
                counts = np.array([[matrix.counts[name]]], np.float32)
                writer.add_tensor(name + COUNTS, counts)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


@dataclass(frozen=True)
class ImatrixFile:
    """An importance matrix as a quantiser needs it."""

    means: dict[str, np.ndarray]
    """float32 (columns,), by GGUF tensor name."""
    dataset: str
    rollouts: int


def read_imatrix(path: Path) -> ImatrixFile:
    """Read a file written by `write_imatrix` or llama-imatrix.

    Raises:
        ImatrixError: no such file, no entries, an entry without count, or a value not finite.
    """
    from gguf import GGUFReader

    if not path.is_file():
        raise ImatrixError(f"there is no importance matrix at {path}")
    reader = GGUFReader(path)
    tensors = {t.name: np.array(t.data, np.float64).reshape(-1) for t in reader.tensors}
    means: dict[str, np.ndarray] = {}
    for name in sorted(n for n in tensors if n.endswith(SUMS)):
        target = name.removesuffix(SUMS)
        counts = tensors.get(target + COUNTS)
        if counts is None or counts.size != 1 or counts[0] <= 0:
            raise ImatrixError(f"{path.name} has no token count for {target}")
        means[target] = (tensors[name] / counts[0]).astype(np.float32)
    check_sums(means)
    if not means:
        raise ImatrixError(f"{path.name} holds no entries")
    datasets = reader.get_field("imatrix.datasets")
    chunks = reader.get_field("imatrix.chunk_count")
    return ImatrixFile(
        means,
        dataset=str(datasets.contents()[0]) if datasets else "unknown",
        rollouts=int(chunks.contents()) if chunks else 0,
    )
