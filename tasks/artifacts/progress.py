"""How a stage tells the world where it is: two files in its own folder, no server needed."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from tasks.artifacts.atomic import dump_json, write_atomic, write_json

PROGRESS_PERIOD_S = 0.5


class Reporter:
    """Appends `metrics.jsonl` and keeps `progress.json` of one stage folder.

    A non-finite metric is written as null, so that a reader sees "unknown", never a number.
    """

    def __init__(self, out_dir: Path) -> None:
        out_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = out_dir / "metrics.jsonl"
        self._progress = out_dir / "progress.json"
        self._written_s = 0.0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at `step`."""
        clean = {k: (float(v) if math.isfinite(v) else None) for k, v in values.items()}
        line = dump_json({"step": step, "time_s": time.time(), "values": clean})
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Say that `done` of `total` units are finished; rate-limited, the last is always kept."""
        now_s = time.monotonic()
        if done < total and now_s - self._written_s < PROGRESS_PERIOD_S:
            return
        self._written_s = now_s
        write_json(self._progress, {"done": done, "total": total, "message": message})

    def drop_metrics_after(self, step: int) -> None:
        """Forget metrics of steps above `step`: a resumed stage takes them again."""
        if not self._metrics.exists():
            return
        kept = [m for m in read_metrics(self._metrics) if m["step"] <= step]
        text = "".join(dump_json(m) + "\n" for m in kept)
        write_atomic(self._metrics, text)


def read_metrics(path: Path) -> list[dict]:
    """Metric lines of a stage; a line cut off by a kill is left out."""
    lines = []
    for raw in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(raw))
        except json.JSONDecodeError:
            continue
    return lines
