"""Refuses files that do not belong into the repository: large ones, and absolute paths in text.

`python .ci/guard.py FILE...`; without files it looks at all that git tracks.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 512 * 1024
_HOME = re.compile(r"(?<![\w./-])/(?:home|root|Users|work)/[\w.-]+")
_INDEX = re.compile(r"--(?:extra-)?index-url[ =]|--find-links[ =]|file:///\w")
_BINARY = {".png", ".gguf", ".safetensors", ".parquet", ".ico", ".woff2"}


def tracked() -> list[Path]:
    """Files git tracks and has not lost; all regular files where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, check=True)
    return [p for name in done.stdout.decode().split("\0") if name and (p := ROOT / name).is_file()]


def problems(path: Path) -> list[str]:
    """What is wrong with one file."""
    size = path.stat().st_size
    found = [f"{path}: {size} bytes, {MAX_BYTES} at most"] if size > MAX_BYTES else []
    if path.suffix in _BINARY:
        return found
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if hit := _HOME.search(line) or _INDEX.search(line):
            found.append(f"{path}:{number}: {hit[0]} holds on one machine only")
    return found


def main(arguments: list[str]) -> int:
    """Print every problem; 1 where there is one."""
    paths = [Path(name) for name in arguments] or tracked()
    found = [line for path in paths if path.is_file() for line in problems(path)]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
