"""llama.cpp's own tools for the benches: found or built, run and timed; their logits file.

`--kl-divergence` takes its tokens from the logits file of the base model, so that is how it is
given ids. Layout: `_logits_`, n_ctx (u32), vocabulary (i32), chunks (i32), the ids (i32, chunks ×
n_ctx), and for each chunk the second half of its positions but the last: scale and lowest
log-probability (f32 each), one u16 for each token of the vocabulary, a padding one where odd.
"""

import os
import re
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ORACLE = Path("tests/oracle")
MAGIC = b"_logits_"
LEVELS = 65535
RANGE_NATS = 16.0
"""What lies further below the best token is stored as if it lay there."""


@dataclass(frozen=True)
class Took:
    """How long one thing took."""

    wall_s: float
    cpu_s: float
    """Of all threads and child processes; what else runs on the machine hardly changes it."""


def find_tools() -> Path:
    """The folder with llama.cpp's tools; builds them the first time, which takes minutes."""
    given = os.environ.get("LLAMA_CPP_TOOLS")
    if given:
        return Path(given).resolve()
    if shutil.which("cmake") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("cmake is missing: `make system`")
    source = _script("fetch.sh")
    return Path(_script("build.sh", source))


def _script(name: str, *arguments: str) -> str:
    done = subprocess.run(
        ["sh", str(ORACLE / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": os.environ.get("PYTHON", ".venv/bin/python")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def timed(command: Sequence[str | Path], folder: Path) -> tuple[str, Took]:
    """Run a program in `folder`; its output and its time.

    The time a child took counts when it has been waited for, so nothing else may end meanwhile.
    """
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False
    )
    wall_s = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return said, Took(wall_s, cpu_s)


def best(times: Sequence[Took]) -> Took:
    """The shortest of several, each figure for itself."""
    return Took(min(t.wall_s for t in times), min(t.cpu_s for t in times))


def mean_kld(said: str) -> float:
    """`Mean KLD` of llama-perplexity's output."""
    found = re.search(r"^.*Mean\s+KLD:\s+(-?[0-9.]+)", said, re.MULTILINE)
    assert found, said[-2000:]
    return float(found.group(1))


def scored_positions(n_ctx: int) -> slice:
    """Positions of a chunk whose next token llama-perplexity looks at."""
    return slice(n_ctx // 2, n_ctx - 1)


def read_base_ids(path: Path) -> np.ndarray:
    """The ids of a logits file, (chunks, n_ctx)."""
    with path.open("rb") as file:
        assert file.read(8) == MAGIC
        n_ctx, _vocab, chunks = struct.unpack("<Iii", file.read(12))
        return np.frombuffer(file.read(4 * n_ctx * chunks), "<i4").reshape(chunks, n_ctx)


def write_base(path: Path, ids: np.ndarray, logits: Iterator[np.ndarray]) -> None:
    """Write a logits file for ids (chunks, n_ctx) from float32 logits (n_ctx, V) of each chunk."""
    chunks, n_ctx = ids.shape
    with path.open("wb") as file:
        for number, rows in enumerate(logits):
            if not number:
                file.write(MAGIC + struct.pack("<Iii", n_ctx, rows.shape[1], chunks))
                file.write(np.ascontiguousarray(ids, "<i4").tobytes())
            file.write(_encoded(rows[scored_positions(n_ctx)]))


def _encoded(logits: np.ndarray) -> bytes:
    """Rows (N, V) in 16 bits, as llama.cpp rounds them."""
    top = logits.max(axis=1, keepdims=True)
    low = np.maximum(logits.min(axis=1, keepdims=True), top - np.float32(RANGE_NATS))
    log_sum = np.log(np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64))
    scale = ((top - low) / LEVELS).astype("<f4")
    lowest = (low - top - log_sum).astype("<f4")
    levels = np.rint(np.maximum(logits - low, 0) / np.where(scale > 0, scale, 1)).astype("<u2")
    odd = levels.shape[1] % 2
    packed = np.concatenate(
        [
            scale.view("<u2"),
            lowest.view("<u2"),
            levels,
            np.zeros((len(levels), odd), "<u2"),
        ],
        axis=1,
    )
    return np.ascontiguousarray(packed).tobytes()
