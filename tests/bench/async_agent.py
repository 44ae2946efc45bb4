"""This project's own RL on the agent of `async_tasks`, and what an adapter is worth."""

import shutil
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from async_tasks import Agent

from configs.schema import PipelineConfig
from configs.schema.evaluation import EvaluationSampling
from tasks.artifacts.progress import Reporter, read_metrics
from tasks.environments import tools_named
from tasks.environments.renderer import PromptRenderer
from tasks.evaluation.answers import answer_problems
from tasks.models.load import load_model, load_tokenizer
from tasks.models.trainable import attach
from tasks.rl import stage as rl_stage
from tasks.rl.weight_sync import MARKER, WEIGHTS
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import PolicyVersion

BASE: dict[str, Any] = {
    "profile": "bench",
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
        "kl": {"coefficient": 0.0, "measure_every": 10},
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
        return float(self.solved(weights).mean())

    def solved(self, weights: Path | None) -> np.ndarray:
        """Whether each held-out problem was solved, (problems,), 0.0 or 1.0."""
        if weights is not None:
            self._engine.load_policy(weights, PolicyVersion(0, 0))
        answers = answer_problems(
            self._engine, self._rows, self._renderer, self._tools, self._sampling
        )
        return np.array([float(a.correct) for a in answers])


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


def ratio_of_medians(ours_s: list[float | None], other_s: list[float | None]) -> float | None:
    """How many times as long the other side takes; None where a side's median never arrives.

    A run that did not reach the target takes for ever.
    """
    mine, other = (
        statistics.median(float("inf") if s is None else s for s in side)
        for side in (ours_s, other_s)
    )
    return None if float("inf") in (mine, other) else other / mine
