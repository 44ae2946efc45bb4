"""Which program runs the model on this device, and whether it is the one the bundle was made with.

Standard library only, Python 3.10. Either an interpreter with llama-cpp-python, whose server is run
as `python -m llama_cpp.server`, or a llama-server that `build_llama_server.sh` made.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_ASK_VERSION = "from importlib.metadata import version; print(version('llama_cpp_python'))"
_ASK_S = 60


class RuntimeMismatchError(ValueError):
    """The model server is missing, or of another version than the golden prompts were made with."""


def absolute_program(name: str, what: str) -> str:
    """Where a program is; a link is kept, since a venv is known by it.

    Raises:
        RuntimeMismatchError: there is none.
    """
    found = shutil.which(name)
    if found is None:
        raise RuntimeMismatchError(f"{what} {name}: no such program")
    return os.path.abspath(found)


def _ask(command: "list[str]") -> "tuple[int, str]":
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeMismatchError(f"cannot run {command[0]}: {error}") from None
    return done.returncode, done.stdout.strip()


def check_python(python: str, wanted: str) -> str:
    """The interpreter has the llama-cpp-python that the golden prompts were made with.

    Raises:
        RuntimeMismatchError: it has not.
    """
    status, found = _ask([python, "-c", _ASK_VERSION])
    if status != 0 or found != wanted:
        raise RuntimeMismatchError(
            f"{python} has llama-cpp-python {found or 'not at all'}; {wanted} is needed. Build it "
            'there with CMAKE_ARGS="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=87 '
            '-DGGML_CUDA_NO_VMM=ON"'
        )
    return f"runtime: llama-cpp-python {found}"


def _note(program: str) -> "dict[str, str | None]":
    """What `build_llama_server.sh` wrote beside a llama-server.

    Raises:
        RuntimeMismatchError: nothing that can be read.
    """
    note = Path(f"{program}.json")
    try:
        built = json.loads(note.read_bytes())
        return {key: built[key] for key in ("source_sha256", "backend", "l4t")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RuntimeMismatchError(
            f"{note} does not say what {program} was built from ({error}); build it with the "
            "bundle's build_llama_server.sh"
        ) from None


def built_for(program: str) -> "str | None":
    """The L4T release a llama-server was built on; None for one that needs no GPU.

    Raises:
        RuntimeMismatchError: nothing says so.
    """
    return _note(program)["l4t"]


def check_llama_server(program: str, source: Mapping) -> str:
    """The llama-server starts, and was built from the source the manifest names.

    Raises:
        RuntimeMismatchError: it does not, or was not, or nothing says from what it was built.
    """
    status, _ = _ask([program, "--version"])
    if status != 0:
        raise RuntimeMismatchError(f"{program} --version failed (status {status}); build it again")
    built = _note(program)
    if built["source_sha256"] != source["sha256"]:
        raise RuntimeMismatchError(
            f"{program} was built from another source ({str(built['source_sha256'])[:12]}…) than "
            f"the bundle names ({source['file']}, {source['sha256'][:12]}…); build it again with "
            "the bundle's build_llama_server.sh"
        )
    return f"runtime: llama-server for {built['backend']}, from {source['file']}"
