"""A GGUF file with some tensors taken from other files: what overrides would make, at no cost.

Quantising a tensor depends on its values, its type and its row of the importance matrix, never on
its neighbours. So a mix of types can be put together from files that already exist, and holds the
bytes that quantising anew with overrides would give.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantize.errors import QuantisationError
from quantize.files import replacing


def splice(base: Path, out: Path, donors: Mapping[str, Path]) -> None:
    """Write `base` to `out` with each tensor in `donors` taken from the file named there.

    Keys and the order of tensors are those of `base`.

    Raises:
        QuantisationError: a tensor that `base` or its donor does not have, or of another shape.
        ArtifactWriteError: the disk refused.
    """
    from gguf import GGUFReader

    reader = GGUFReader(base)
    unknown = sorted(set(donors) - {t.name for t in reader.tensors})
    if unknown:
        raise QuantisationError(f"{base.name} holds no tensor {', '.join(unknown[:6])}")
    opened = {path: GGUFReader(path) for path in set(donors.values())}
    tensors = [
        _from_donor(opened[donors[t.name]], t, donors[t.name]) if t.name in donors else t
        for t in reader.tensors
    ]
    write_like(reader, out, tensors)


@dataclass(frozen=True)
class Replaced:
    """A tensor whose bytes are new; all else is as it was."""

    name: str
    shape: Any
    tensor_type: Any
    n_bytes: int
    data: np.ndarray

    @classmethod
    def of(cls, tensor: Any, data: np.ndarray) -> "Replaced":
        """`tensor` with other data of the same size."""
        return cls(tensor.name, tensor.shape, tensor.tensor_type, int(tensor.n_bytes), data)


def write_like(reader: Any, out: Path, tensors: Sequence[Any]) -> None:
    """Write a file with the keys of `reader` and these tensors, which have its names and order.

    Raises:
        ArtifactWriteError: the disk refused.
    """
    with replacing(out) as temporary, temporary.open("wb") as file:
        file.write(reader.data[: reader.tensors[0].field.offset].tobytes())
        file.write(_tensor_table(tensors, reader.alignment))
        file.write(bytes(_gap(file.tell(), reader.alignment)))
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.data).tobytes())
            file.write(bytes(_gap(int(tensor.n_bytes), reader.alignment)))


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two files hold the same tensors, whatever their keys say."""
    from gguf import GGUFReader

    first, second = GGUFReader(a).tensors, GGUFReader(b).tensors
    return [(t.name, t.tensor_type) for t in first] == [
        (t.name, t.tensor_type) for t in second
    ] and all(np.array_equal(x.data, y.data) for x, y in zip(first, second, strict=True))


def _from_donor(donor: Any, wanted: Any, path: Path) -> Any:
    found = next((t for t in donor.tensors if t.name == wanted.name), None)
    if found is None or list(found.shape) != list(wanted.shape):
        shape = None if found is None else [int(n) for n in found.shape]
        raise QuantisationError(
            f"{path.name} has {wanted.name} with shape {shape}; expected "
            f"{[int(n) for n in wanted.shape]}: it was not made from the same model"
        )
    return found


def _tensor_table(tensors: Sequence[Any], alignment: int) -> bytes:
    """Name, dimensions, type and offset of each tensor, as ggml docs/gguf.md lays them out."""
    parts: list[bytes] = []
    offset = 0
    for tensor in tensors:
        name = tensor.name.encode()
        shape = [int(n) for n in tensor.shape]
        parts.append(struct.pack("<Q", len(name)) + name)
        parts.append(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        parts.append(struct.pack("<IQ", int(tensor.tensor_type), offset))
        offset += int(tensor.n_bytes) + _gap(int(tensor.n_bytes), alignment)
    return b"".join(parts)


def _gap(length: int, alignment: int) -> int:
    """Bytes from `length` to the next multiple of `alignment`."""
    return -length % alignment
