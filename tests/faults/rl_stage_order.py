"""RL stages in processes of their own: the order, and how `rl_stage_child` gets it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from tests.tiny_run import TinyData, TinySnapshot

ROOT = Path(__file__).parents[2]
CHILD = (sys.executable, "-m", "tests.faults.rl_stage_child")


@dataclass(frozen=True)
class Point:
    """Where a run ends: at the `count`-th call of `target`, `before` or `after` it runs."""

    target: str
    when: str
    count: int


def order_of(
    config: PipelineConfig,
    data: TinyData,
    snapshot: TinySnapshot,
    out: Path,
    kill: Point | None = None,
) -> dict[str, Any]:
    """What the child is to run, and where it is to die."""
    inputs = {"data": data.record, "sft": snapshot.record}
    order = {
        "config": config.model_dump(mode="json"),
        "inputs": {name: record.model_dump(mode="json") for name, record in inputs.items()},
        "out": out.as_posix(),
    }
    return order if kill is None else order | {"kill": asdict(kill)}


def environment(**more: str) -> dict[str, str]:
    """Of a child: it finds the code wherever it starts, and takes one thread."""
    return os.environ | {"PYTHONPATH": ROOT.as_posix(), "OMP_NUM_THREADS": "1"} | more


def start(order: dict[str, Any], log: Path, **more: str) -> "subprocess.Popen[str]":
    """A child at work on one order; what it says is added to `log`, `more` to its environment."""
    with log.open("a") as said:
        child = subprocess.Popen(
            CHILD, env=environment(**more), cwd=ROOT, stdin=subprocess.PIPE,
            stdout=said, stderr=said, text=True,
        )  # fmt: skip
    give(order, child)
    return child


def give(order: dict[str, Any], child: "subprocess.Popen[str]") -> None:
    """Hand a child that was started without an argument its one order."""
    assert child.stdin is not None
    child.stdin.write(json.dumps(order))
    child.stdin.close()
