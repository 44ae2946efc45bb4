"""How much of the device's unified memory a model needs when it is served, and what would help.

Need = weights + KV cache + compute + output + CUDA context + server + margin, held against
MemAvailable. Weights, KV, compute and output are what llama.cpp itself will report; the CUDA
context is an estimate until it is measured on a device.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from deployment.jetson.compute_buffer import cells_per_slot, compute_bytes
from deployment.jetson.errors import ServingError
from deployment.jetson.file_size import FILE_TYPES, FileSize, FileType, predict_file
from deployment.jetson.model_shape import ModelShape
from deployment.jetson.on_device.llama_child import N_UBATCH

KvType = Literal["F16", "Q8_0"]
# bytes for one value of the cache
_KV_BYTES: Mapping[KvType, float] = {"F16": 2.0, "Q8_0": 34 / 32}
MOST_SLOTS = 256
LEAST_UBATCH, LEAST_CONTEXT = 32, 256
CUDA_CONTEXT_BYTES = 3 * 2**30 // 10
"""An estimate, 0.3 GiB; to be replaced by a measurement on the device."""
SERVER_BYTES = 160 * 2**20
"""Python processes: the model server and the agent."""
MARGIN_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Serving:
    """How a model is served."""

    context: int
    """Tokens of all slots together."""
    slots: int = 1
    ubatch: int = N_UBATCH
    kv_type: KvType = "F16"
    flash_attention: bool = False
    gpu: bool = True
    """Layers lie on the GPU; a tied embedding is then held twice, once for the CPU to look up."""

    def checked(self) -> "Serving":
        """Itself.

        Raises:
            ServingError: a number out of range, or a quantised cache without flash attention.
        """
        for name, value, least, most in (
            ("context", self.context, 1, 1 << 22),
            ("slots", self.slots, 1, MOST_SLOTS),
            ("ubatch", self.ubatch, 1, 1 << 16),
        ):
            if not least <= value <= most:
                raise ServingError(f"{name}={value}: expected {least} to {most}")
        if self.slots > self.context:
            raise ServingError(f"slots={self.slots} of a context of {self.context} tokens")
        if self.kv_type not in _KV_BYTES:
            raise ServingError(f"kv_type={self.kv_type}: expected F16 or Q8_0")
        if self.kv_type != "F16" and not self.flash_attention:
            raise ServingError(
                f"kv_type={self.kv_type}: llama.cpp quantises the V cache with flash attention "
                "only; turn it on"
            )
        return self


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use; `total_bytes` is compared with MemAvailable."""

    weights_bytes: int
    kv_cache_bytes: int
    compute_bytes: int
    output_bytes: int
    embedding_copy_bytes: int
    cuda_context_bytes: int
    server_bytes: int
    margin_bytes: int
    total_bytes: int

    def as_json(self) -> dict[str, int]:
        """For the manifest."""
        return asdict(self)


def kv_bytes_per_token(shape: ModelShape, kv_type: KvType = "F16") -> float:
    """layers · kv_heads · (d_k + d_v) · bytes of one value."""
    values = shape.layers * shape.kv_heads * (shape.key_length + shape.value_length)
    return values * _KV_BYTES[kv_type]


def plan_memory(shape: ModelShape, file: FileSize, serving: Serving) -> MemoryPlan:
    """What serving this file this way takes.

    Raises:
        ServingError: it cannot be served this way.
    """
    serving.checked()
    cells = cells_per_slot(serving.context, serving.slots) * serving.slots
    compute = compute_bytes(
        shape,
        serving.context,
        slots=serving.slots,
        ubatch=serving.ubatch,
        flash=serving.flash_attention,
        kv_type=serving.kv_type,
    )
    parts = (
        file.data_bytes,
        int(kv_bytes_per_token(shape, serving.kv_type) * cells),
        compute,
        shape.vocabulary * 4 * serving.slots,
        file.embedding_bytes if shape.tied and serving.gpu else 0,
        CUDA_CONTEXT_BYTES if serving.gpu else 0,
        SERVER_BYTES,
        MARGIN_BYTES,
    )
    return MemoryPlan(*parts, total_bytes=sum(parts))


@dataclass(frozen=True)
class Remedy:
    """One change, how much it frees, and whether it alone is enough; bytes."""

    change: str
    frees_bytes: int
    enough: bool


def _halved(value: int, least: int) -> int | None:
    return value // 2 if value // 2 >= least else None


def _changes(serving: Serving) -> list[tuple[str, Serving]]:
    """Ways to serve the same file with less, the cheapest in quality and speed first."""
    found: list[tuple[str, Serving]] = []
    if (half := _halved(serving.ubatch, LEAST_UBATCH)) is not None:
        target = min(half, N_UBATCH)
        found.append((f"ubatch {serving.ubatch} → {target}", replace(serving, ubatch=target)))
    if not serving.flash_attention:
        found.append(("flash attention on", replace(serving, flash_attention=True)))
    if serving.kv_type == "F16":
        eight = replace(serving, kv_type="Q8_0", flash_attention=True)
        found.append(("KV cache F16 → Q8_0 (with flash attention)", eight))
    if serving.slots > 1:
        share = cells_per_slot(serving.context, serving.slots)
        one = replace(serving, slots=1, context=share)
        found.append((f"slots {serving.slots} → 1, of {share} tokens", one))
    if (half := _halved(serving.context, LEAST_CONTEXT)) is not None and half >= serving.slots:
        found.append((f"context {serving.context} → {half}", replace(serving, context=half)))
    return found


def smaller_types(file_type: FileType | None, file: FileSize, shape: ModelShape) -> list[FileType]:
    """Types whose file would be smaller, the largest of them first."""
    sizes = {t: predict_file(shape, t).file_bytes for t in FILE_TYPES if t != file_type}
    return [t for t in FILE_TYPES if t in sizes and sizes[t] < file.file_bytes]


def _together(
    shape: ModelShape, file: FileSize, serving: Serving, available: int, headless_bytes: int
) -> Remedy:
    """Change after change until the plan fits, or all of them; the context is halved last."""
    before = plan_memory(shape, file, serving).total_bytes
    names = ["headless mode"] if headless_bytes > 0 else []
    room, total = available + headless_bytes, before
    for _ in range(len(_changes(serving))):
        done = {name.split(" ")[0] for name in names}
        left = [change for change in _changes(serving) if change[0].split(" ")[0] not in done]
        if total <= room or not left:
            break
        name, serving = left[0]
        names.append(name)
        total = plan_memory(shape, file, serving).total_bytes
    return Remedy(" + ".join(names), before - total + headless_bytes, total <= room)


def remedies(
    shape: ModelShape,
    file: FileSize,
    serving: Serving,
    available: int,
    *,
    file_type: FileType | None = None,
    headless_bytes: int = 0,
) -> list[Remedy]:
    """Every change that frees memory; `enough` where it alone makes the plan fit.

    `headless_bytes` is what leaving the desktop would add to `available`; 0 where it is left.
    """
    need = plan_memory(shape, file, serving).total_bytes
    found = []
    if headless_bytes > 0:
        enough = need <= available + headless_bytes
        found.append(Remedy("headless mode (up to)", headless_bytes, enough))

    def consider(change: str, after: Callable[[], MemoryPlan]) -> None:
        total = after().total_bytes
        if total < need:
            found.append(Remedy(change, need - total, total <= available))

    for change, other in _changes(serving):
        consider(change, lambda other=other: plan_memory(shape, file, other))
    if found and not any(remedy.enough for remedy in found):
        found.append(_together(shape, file, serving, available, headless_bytes))
    for kind in smaller_types(file_type, file, shape):
        smaller = predict_file(shape, kind)
        consider(f"type {kind}", lambda smaller=smaller: plan_memory(shape, smaller, serving))
    return found


def longest_context(shape: ModelShape, file: FileSize, serving: Serving, available: int) -> int:
    """The largest context, in steps of 256 tokens, that fits; 0 where not even one step does."""
    low, high = 0, shape.trained_context * serving.slots // LEAST_CONTEXT
    while low < high:
        middle = (low + high + 1) // 2
        wider = replace(serving, context=middle * LEAST_CONTEXT)
        if plan_memory(shape, file, wider).total_bytes <= available:
            low = middle
        else:
            high = middle - 1
    return low * LEAST_CONTEXT
