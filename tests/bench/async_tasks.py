"""One small agent with two tasks, made once, for the benches of the engine.

SFT teaches it a right and a wrong way through each task, mostly the wrong one, so that RL has
something to find within a minute:

- `multi`: calculator problems of one operation, through the tool (right) or at once (mostly wrong);
- `single`: "count 214 by 2", seven terms upwards (right) or downwards (wrong): 28 tokens, one turn.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from tasks.artifacts.atomic import write_jsonl
from tasks.artifacts.content_hash import hash_file, hash_json
from tasks.artifacts.folder import replace_folder
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord
from tasks.environments.calculator_problems import (
    AFTER_THE_TOOL,
    direct_messages,
    problem,
    tool_messages,
)
from tasks.environments.row import Demonstration, Message, Row, read_rows
from tasks.models.load import hash_model
from tasks.sft import stage as sft_stage

CACHE = Path(".cache/bench")
TRAIN_ROWS, HELDOUT_ROWS = 1024, 512
SHOWN = 8
"""Demonstrations of each row."""
RIGHT_SHARE = 0.3
"""Of the demonstrations of each task, those that show the way that pays."""
ANSWERS = 4
"""Demonstrations of each calculator row that begin after the tool has answered: copying its result
limits the agent, and these do not teach when to call."""
TERMS = 7
SFT: dict[str, Any] = {
    "steps": 400,
    "batch_size": 48,
    "trainable": {"type": "full"},
    "optimiser": {"lr": 2.0e-3, "warmup_steps": 20, "decay": "linear"},
    "deepspeed": {"micro_batch_tokens": 1600},
}


@dataclass(frozen=True)
class Agent:
    """The snapshot both sides start from, and the rows of both tasks."""

    root: Path
    sft: ArtifactRecord

    @property
    def snapshot(self) -> Path:
        """Folder of the model."""
        return self.sft.path / "snapshot"

    def data(self, task: str) -> ArtifactRecord:
        """The dataset of a task, as the RL stage takes it."""
        folder = self.root / task
        return ArtifactRecord(kind="dataset", uri=folder.as_posix(), sha256=hash_json(task))

    def rows(self, task: str, side: str) -> list[Row]:
        """`train` or `heldout` rows of a task."""
        return read_rows(self.root / task / f"{side}.jsonl")


def make_agent() -> Agent:
    """The agent of this file's very text: from the cache, or made now (two minutes of one core)."""
    root = CACHE / hash_file(Path(__file__))[:12]
    if not root.exists():
        with replace_folder(root) as temporary:
            _make(temporary)
    snapshot = root / "sft" / "snapshot"
    record = ArtifactRecord(
        kind="model", uri=(root / "sft").as_posix(), sha256=hash_model(snapshot)
    )
    return Agent(root, record)


def _make(root: Path) -> None:
    shown: list[Demonstration] = []
    for task, rows in {"multi": calculator_rows(), "single": counting_rows()}.items():
        random.Random(task).shuffle(rows)
        train = rows[HELDOUT_ROWS : HELDOUT_ROWS + TRAIN_ROWS]
        write_jsonl(root / task / "train.jsonl", (r.model_dump() for r in train))
        heldout = rows[:HELDOUT_ROWS]
        write_jsonl(root / task / "heldout.jsonl", (r.model_dump() for r in heldout))
        shown += demonstrations(task, train)
    write_jsonl(root / "demonstrations.jsonl", (d.model_dump() for d in shown))
    config = PipelineConfig.model_validate({"profile": "bench", "sft": SFT})
    data = ArtifactRecord(kind="dataset", uri=root.as_posix(), sha256="0")
    sft_stage.run(config, {"data": data}, root / "sft", Reporter(root / "sft"))


def calculator_rows() -> list[Row]:
    """Distinct problems of one operation on numbers of two digits, results of three at most.

    A longer result is hard to copy for a model this small, and would cap what both sides reach.
    """
    rng = random.Random("calculator rows")
    asked: dict[str, Row] = {}
    while len(asked) < TRAIN_ROWS + HELDOUT_ROWS:
        expression = f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)}"
        row = problem(expression, "easy")
        if abs(int(row.answer)) < 1000:
            asked[expression] = row
    return list(asked.values())


def counting_rows() -> list[Row]:
    """Distinct counting problems; the answer is the last of `TERMS` terms upwards."""
    every = [(start, by) for start in range(100, 900) for by in (1, 2)]
    chosen = random.Random("counting rows").sample(every, TRAIN_ROWS + HELDOUT_ROWS)
    return [
        Row(
            id=f"count-{start}-{by}",
            prompt=f"count {start} by {by}",
            answer=str(start + TERMS * by),
            source="counting",
            meta={"start": start, "by": by},
        )
        for start, by in chosen
    ]


def counting_messages(row: Row, sign: int) -> list[Message]:
    """A counting problem and its terms, upwards (+1) or downwards (-1)."""
    start, by = row.meta["start"], row.meta["by"]
    said = " ".join(str(start + sign * i * by) for i in range(1, TERMS + 1))
    return [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": said}]


def demonstrations(task: str, rows: Sequence[Row]) -> list[Demonstration]:
    """`SHOWN` conversations about every row, `RIGHT_SHARE` of them the right way; and answers."""
    rng = random.Random(f"demonstrations {task}")
    shown = []
    for index in range(SHOWN):
        for row in rows:
            right = rng.random() < RIGHT_SHARE
            if task == "multi":
                messages = tool_messages(row) if right else direct_messages(row)
            else:
                messages = counting_messages(row, +1 if right else -1)
            shown.append(Demonstration(id=f"{row.id}-{index}", row_id=row.id, messages=messages))
    for index in range(ANSWERS if task == "multi" else 0):
        for row in rows:
            name = f"{row.id}-answer-{index}"
            shown.append(
                Demonstration(
                    id=name,
                    row_id=row.id,
                    messages=tool_messages(row),
                    learn_from=AFTER_THE_TOOL,
                )
            )
    return shown
