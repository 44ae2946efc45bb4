"""One small agent with two tasks, and this project's own RL on it, for the benches of the engine.

The agent is made once per content of its recipe (`.cache/bench/<hash>`), so that every figure and
both sides of each start from the very same weights. SFT teaches it a right and a wrong way through
each task, mostly the wrong one, so that RL has something to find within a minute:

- `multi`: easy calculator problems, through the tool (right) or at once (mostly wrong);
- `single`: "count 214 by 3", seven terms upwards (right) or downwards (wrong); 28 tokens, one turn.
"""

import random
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.schema import PipelineConfig
from configs.schema.evaluation import EvaluationSampling
from tasks.artifacts.atomic import write_json, write_jsonl
from tasks.artifacts.content_hash import hash_json
from tasks.artifacts.folder import replace_folder
from tasks.artifacts.progress import Reporter, read_metrics
from tasks.artifacts.record import ArtifactRecord
from tasks.environments import tools_named
from tasks.environments.calculator_problems import (
    AFTER_THE_TOOL,
    direct_messages,
    problem,
    tool_messages,
)
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Demonstration, Message, Row, read_rows
from tasks.evaluation.answers import answer_problems
from tasks.models.load import hash_model, load_model, load_tokenizer
from tasks.models.trainable import attach
from tasks.rl import stage as rl_stage
from tasks.rl.weight_sync import MARKER, WEIGHTS
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import PolicyVersion
from tasks.sft import stage as sft_stage

CACHE = Path(".cache/bench")
TRAIN_ROWS, HELDOUT_ROWS = 2048, 512
RIGHT_SHARE = 0.3
"""Of the demonstrations of each task, those that show the way that pays."""
ANSWERS = 2
"""Demonstrations of each calculator row that begin after the tool has answered: copying its result
limits the agent, and these do not teach when to call."""
TERMS = 7
SFT_STEPS, SFT_BATCH = 520, 48
BASE: dict[str, Any] = {
    "profile": "bench",
    "sft": {
        "steps": SFT_STEPS,
        "batch_size": SFT_BATCH,
        "trainable": {"type": "full"},
        "optimiser": {"lr": 2.0e-3, "warmup_steps": 20, "decay": "linear"},
        "deepspeed": {"micro_batch_tokens": 1600},
    },
    "rl": {
        "batch_size": 128,
        "group_size": 8,
        "publish": {"start": 1, "end": 1, "over_steps": 1},
        "runtime": {"type": "ray", "rollout_workers": 1},
        "trainable": {
            "type": "lora",
            "r": 16,
            "alpha": 32,
            "targets": [
                "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
            ],
        },
        "optimiser": {"lr": 1.0e-3, "warmup_steps": 5},
        "kl": {"coefficient": 0.0},
        "reward": {"format": {"start": 0.0, "end": 0.0}},
        "reward_gate": {"min_std": 0, "max_saturated_share": 1.0},
        "skip_zero_advantage": True,
    },
}  # fmt: skip
"""The calculator's batch, group, adapter and optimiser; no KL term, which TRL leaves out too."""
TURN_TOKENS = 32
TASKS: dict[str, dict[str, Any]] = {
    "multi": {
        "tools": ["calc"],
        "rl": {"sampling": {"max_new_tokens": TURN_TOKENS, "max_turns": 2}},
    },
    "single": {
        "tools": [],
        "rl": {"sampling": {"max_new_tokens": 2 * TURN_TOKENS, "max_turns": 1}},
    },
}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings laid over each other; a mapping with another `type` replaces."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = result.get(key)
            both = isinstance(old, dict) and isinstance(value, Mapping)
            if both and value.get("type") in (None, old.get("type")):
                result[key] = merged(old, value)
            else:
                result[key] = merged(value) if isinstance(value, Mapping) else value
    return result


def configured(task: str, overrides: Mapping[str, Any]) -> PipelineConfig:
    """The config of a task; `overrides` as in YAML."""
    return PipelineConfig.model_validate(merged(BASE, TASKS[task], overrides))


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
    """The agent of this recipe: from the cache, or made now (about two minutes of one core)."""
    recipe = {
        "sft": BASE["sft"],
        "rows": [TRAIN_ROWS, HELDOUT_ROWS],
        "terms": TERMS,
        "answers": ANSWERS,
    }
    root = CACHE / hash_json(recipe)[:12]
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
    config = configured("multi", {})
    data = ArtifactRecord(kind="dataset", uri=root.as_posix(), sha256="0")
    sft_stage.run(config, {"data": data}, root / "sft", Reporter(root / "sft"))


def calculator_rows() -> list[Row]:
    """Distinct problems of one operation on two numbers of two digits."""
    rng = random.Random("calculator rows")
    wanted = TRAIN_ROWS + HELDOUT_ROWS
    asked: dict[str, None] = {}
    while len(asked) < wanted:
        asked[f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)}"] = None
    return [problem(expression, "easy") for expression in asked]


def counting_rows() -> list[Row]:
    """Distinct counting problems; the answer is the last of `TERMS` terms upwards."""
    every = [(start, by) for start in range(100, 900) for by in range(1, 6)]
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
    """Four conversations about every row, `RIGHT_SHARE` of them the right way; and answers."""
    rng = random.Random(f"demonstrations {task}")
    shown = []
    for index in range(4):
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


@dataclass(frozen=True)
class Moment:
    """Weights after an optimiser step, and the seconds of work it took to get there."""

    step: int
    seconds: float
    weights: Path


@dataclass(frozen=True)
class Run:
    """What one run of the RL stage left behind."""

    summary: dict[str, Any]
    ledger: dict[str, Any]
    metrics: list[dict[str, Any]]
    """Lines of `metrics.jsonl`, one a step."""
    started_s: float
    """Wall-clock time (Unix) at which the first weights were published, before the first sample."""
    moments: list[Moment]

    def seconds_at(self, step: int) -> float:
        """From the first sample to the end of an optimiser step (the cycle's end, all told)."""
        return self.metrics[step - 1]["time_s"] - self.started_s


def run_rl(agent: Agent, task: str, overrides: Mapping[str, Any], out: Path) -> Run:
    """Run the RL stage as the pipeline does, keeping every publish it makes."""
    shutil.rmtree(out, ignore_errors=True)
    config = configured(task, overrides)
    inputs = {"data": agent.data(task), "sft": agent.sft}
    with _Keeper(out) as keeper:
        record = rl_stage.run(config, inputs, out, Reporter(out))
    metrics = read_metrics(out / "metrics.jsonl")
    started_s = keeper.published_s[0]
    moments = [
        Moment(step, metrics[step - 1]["time_s"] - started_s, keeper.path(step))
        for step in sorted(keeper.published_s)
        if 1 <= step <= len(metrics)
    ]
    return Run(record.meta, record.meta["ledger"], metrics, started_s, moments)


class _Keeper:
    """Keeps each publish by a hard link before the run forgets it; costs a look every 50 ms."""

    def __init__(self, out: Path) -> None:
        self._publishes, self._kept = out / "publish", out / "kept"
        self._kept.mkdir(parents=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.published_s: dict[int, float] = {}
        """Unix time of each step's publish."""

    def path(self, step: int) -> Path:
        """Weights published after a step."""
        return self._kept / f"{step:04d}.safetensors"

    def __enter__(self) -> "_Keeper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._look()

    def _look(self) -> None:
        for marker in self._publishes.glob(f"*/{MARKER}"):
            step = int(marker.parent.name.split("-")[1])
            if step in self.published_s:
                continue
            try:
                published_s = marker.stat().st_mtime
                self.path(step).hardlink_to(marker.parent / WEIGHTS)
            except FileNotFoundError:
                continue  # forgotten between the two looks
            self.published_s[step] = published_s


class Judge:
    """Held-out accuracy of adapters, outside every clock."""

    def __init__(self, agent: Agent, task: str, *, problems: int, threads: int = 2) -> None:
        torch.set_num_threads(threads)
        config = configured(task, {})
        self._renderer = PromptRenderer(load_tokenizer(agent.snapshot), config.system_prompt)
        self._engine = TransformersEngine(
            attach(load_model(agent.snapshot), config.rl.trainable, config.rl.seed),
            end_of_turn_id=self._renderer.end_of_turn_id,
            max_length=config.model.max_length,
        )
        self._rows = agent.rows(task, "heldout")[:problems]
        self._tools = tools_named(config.tools)
        sampling = config.rl.sampling
        self._sampling = EvaluationSampling(
            temperature=1.0,
            max_new_tokens=sampling.max_new_tokens,
            max_turns=sampling.max_turns,
            samples=1,
        )

    def accuracy(self, weights: Path | None) -> float:
        """Share of held-out problems solved at temperature 1; None judges the snapshot itself."""
        if weights is not None:
            self._engine.load_policy(weights, PolicyVersion(0, 0))
        answers = answer_problems(
            self._engine, self._rows, self._renderer, self._tools, self._sampling
        )
        return sum(bool(a.correct) for a in answers) / len(answers)


@dataclass(frozen=True)
class Reached:
    """When a target accuracy was reached, and every accuracy looked at on the way."""

    seconds: float | None
    step: int | None
    curve: tuple[tuple[int, float, float], ...]
    """(step, seconds, accuracy) of the moments looked at."""


def time_to(target: float, moments: Sequence[Moment], judge: Judge, every: int) -> Reached:
    """The first of every `every`-th moments whose held-out accuracy reaches `target`."""
    curve = []
    for moment in moments:
        if moment.step % every:
            continue
        accuracy = judge.accuracy(moment.weights)
        curve.append((moment.step, moment.seconds, accuracy))
        if accuracy >= target:
            return Reached(moment.seconds, moment.step, tuple(curve))
    return Reached(None, None, tuple(curve))


def keep(path: Path, run: Run) -> None:
    """Leave a run's own figures beside the bench's."""
    write_json(path, {"summary": run.summary, "metrics": run.metrics, "started_s": run.started_s})
