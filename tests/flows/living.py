"""Whether a process is alive."""

import os
from pathlib import Path


def pid_lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X") and os.path.exists(f"/proc/{pid}")
