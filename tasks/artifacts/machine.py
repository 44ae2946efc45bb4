"""How fast this machine is: a float32 matrix product, timed in a process of its own."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tasks.artifacts.provenance import module_environment

SIZE = 2048
REPEATS = 3
TIMEOUT_S = 120.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Machine:
    """`gflops_f32` is None where it could not be measured; `cores` are those we may use."""

    gflops_f32: float | None
    cores: int


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def time_matmul(size: int = SIZE, repeats: int = REPEATS) -> float:
    """Best GFLOP/s of `repeats` float32 products of two size × size matrices (2·size³ each)."""
    import numpy as np

    left = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    right = left.T.copy()
    left @ right  # the first product pays for thread start and page faults
    best_s = float("inf")
    for _ in range(repeats):
        start_s = time.perf_counter()
        left @ right
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * size**3 / best_s / 1e9


def measure_machine() -> Machine:
    """Time the product on all usable cores, whatever thread limits this process was given."""
    cores = usable_cores()
    environment = {**module_environment(), **dict.fromkeys(_THREAD_VARIABLES, str(cores))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tasks.artifacts.machine"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        gflops = float(json.loads(done.stdout)["gflops_f32"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return Machine(None, cores)
    return Machine(round(gflops, 1), cores)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"gflops_f32": time_matmul()}))
