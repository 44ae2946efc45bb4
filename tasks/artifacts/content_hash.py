"""The one content hash (sha256, hex): of bytes, files, JSON values, folders and weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts.atomic import dump_json

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 20


def hash_bytes(data: bytes) -> str:
    """Sha256 of `data`, hex."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path) -> str:
    """Sha256 of a file's bytes, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """Sha256 of the canonical JSON of `value` (sorted keys)."""
    return hash_bytes(dump_json(value).encode())


def hash_tree(folder: Path) -> str:
    """Sha256 over the sorted relative paths and file hashes under `folder`."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{hash_file(path)}\n".encode())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, "torch.Tensor"]) -> str:
    """Sha256 over canonical tensors: sorted name, dtype, shape, bytes.

    Files of the same weights differ from process to process (safetensors metadata); this does not.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
