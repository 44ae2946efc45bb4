"""The engine against itself: asynchronous over synchronous, and what publish and checkpoint cost.

Both sides of a comparison have the same two actors of one thread each (`rl.runtime.type: ray`), the
same agent, prompts, batch and group; only the staleness limit and the tools differ.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from async_agent import Judge, Run, configured, merged, run_rl
from async_tasks import HELDOUT_ROWS, Agent, make_agent

from configs.schema import PipelineConfig
from tasks.artifacts.bootstrap import paired_bootstrap
from tasks.rl.runtime.inline import InlineRuntimeDriver
from tests.figures.record import record

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

ETA = 4
LATENCY = {"tools": {"simulated_latency": {"median_s": 0.3, "sigma": 1.0, "max_s": 10.0}}}
WARM_UP, MEASURED = 5, 12
"""Optimiser steps; as many as may be sampled ahead follow, in which nothing is sampled any more."""
SEEDS = (0, 1, 2)
ACCURACY_STEPS = 24


@pytest.fixture(scope="module")
def agent() -> Agent:
    return make_agent()


@dataclass(frozen=True)
class Rate:
    """What a run did between its warm-up and its last batches."""

    samples_per_s: float
    details: dict[str, Any]


def rate(agent: Agent, eta: int, overrides: dict[str, Any], out: Path) -> Rate:
    """Samples trained on per second at a staleness limit, after the warm-up."""
    steps = WARM_UP + MEASURED + ETA + 1
    settings = {"steps": steps, "staleness_limit": eta, "checkpoint_every": steps}
    run = run_rl(agent, "multi", {"rl": merged(settings, overrides)}, out)
    seconds = run.seconds_at(WARM_UP + MEASURED) - run.seconds_at(WARM_UP)
    batch = run.summary["samples"] / run.summary["steps"]
    return Rate(
        MEASURED * batch / seconds,
        {
            "samples_per_s": MEASURED * batch / seconds,
            "step_s": seconds / MEASURED,
            "overlap_share": run.summary["overlap_share"],
            "max_staleness_seen": run.summary["max_staleness_seen"],
            "dropped_share": run.summary["dropped_share"],
            "seconds_by_state": run.ledger["seconds"],
        },
    )


def async_over_sync(
    figure: str, agent: Agent, overrides: dict[str, Any], target: float | None, folder: Path
) -> None:
    """Measure both sides in one run and record their ratio."""
    sync = rate(agent, 0, overrides, folder / "sync")
    ahead = rate(agent, ETA, overrides, folder / "async")
    ratio = ahead.samples_per_s / sync.samples_per_s
    print(f"\n{figure}: {ratio:.2f} ×", ahead.details, sync.details)
    record(
        figure,
        value=ratio,
        met=target is None or ratio >= target,
        note=f"η={ETA} {ahead.samples_per_s:.1f} samples/s against η=0 {sync.samples_per_s:.1f}; "
        f"{MEASURED} steps of 128 samples after {WARM_UP} of warm-up, one thread for each of "
        f"generator and learner; overlap {ahead.details['overlap_share']:.0%}",
        details={"async": ahead.details, "sync": sync.details},
    )
    assert ahead.details["max_staleness_seen"] >= 1, "nothing was sampled ahead"
    assert sync.details["max_staleness_seen"] == 0


@pytest.mark.figure("async_over_sync_tool_latency")
def test_async_over_sync_with_slow_tools(agent, tmp_path):
    async_over_sync("async_over_sync_tool_latency", agent, LATENCY, 1.8, tmp_path)


@pytest.mark.figure("async_over_sync_no_latency")
def test_async_over_sync_without_latency(agent, tmp_path):
    async_over_sync("async_over_sync_no_latency", agent, {}, None, tmp_path)


@pytest.mark.figure("async_minus_sync_accuracy")
def test_accuracy_async_minus_sync(agent, tmp_path):
    """At equal samples; the interval is over held-out problems, all seeds of each together."""
    judge = Judge(agent, "multi", problems=HELDOUT_ROWS)
    sides: dict[int, list[np.ndarray]] = {ETA: [], 0: []}
    samples = set()
    for seed in SEEDS:
        for eta, solved in sides.items():
            settings = {"steps": ACCURACY_STEPS, "staleness_limit": eta, "seed": seed}
            run = run_rl(
                agent,
                "multi",
                {"rl": {**settings, "checkpoint_every": ACCURACY_STEPS}},
                tmp_path / f"{eta}-{seed}",
            )
            samples.add(run.summary["samples"])
            solved.append(judge.solved(run.moments[-1].weights))
    assert len(samples) == 1, "both sides must train on as many samples"
    ahead, sync = (np.stack(sides[eta], axis=1) for eta in (ETA, 0))
    difference = paired_bootstrap(ahead, sync)
    points = [100 * x for x in difference]
    by_seed = {
        seed: [float(ahead[:, i].mean()), float(sync[:, i].mean())] for i, seed in enumerate(SEEDS)
    }
    print("\naccuracy, asynchronous and synchronous:", by_seed, points)
    record(
        "async_minus_sync_accuracy",
        value=points[0],
        met=points[1] > -3,
        seeds=SEEDS,
        note=f"{100 * ahead.mean():.1f} % against {100 * sync.mean():.1f} %, 95 % interval "
        f"[{points[1]:+.1f}, {points[2]:+.1f}] over {len(ahead)} problems, η={ETA}, "
        f"{samples.pop():.0f} samples each",
        details={"by_seed": by_seed, "ci95": points[1:]},
    )


CYCLE_STEPS = 40
PROOFS = 10


@dataclass(frozen=True)
class OwnRun:
    """A run of the calculator's own RL block on the agent of the benches, and its books."""

    run: Run
    config: PipelineConfig
    seconds: dict[str, dict[str, float]]
    """By slot and state."""

    @property
    def wall_s(self) -> float:
        """From the first sample to the last step."""
        return self.run.seconds_at(CYCLE_STEPS)


@pytest.fixture(scope="module")
def own_run(agent, tmp_path_factory) -> OwnRun:
    folder = tmp_path_factory.mktemp("own")
    block = yaml.safe_load(Path("configs/calculator.yaml").read_text(encoding="utf-8"))["rl"]
    overrides = {"rl": {**block, "steps": CYCLE_STEPS}}
    run = run_rl(agent, "multi", overrides, folder)
    ledger = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))
    return OwnRun(run, configured("multi", overrides), ledger["seconds"])


def share_of_cycle(figure: str, own: OwnRun, taken_s: float, most: float, said: str) -> None:
    """Record what `taken_s` is of the run's cycles."""
    share = taken_s / own.wall_s
    print(f"\n{figure}: {share:.3f}", own.seconds, own.wall_s)
    record(
        figure,
        value=share,
        met=share <= most,
        note=f"{said}: {taken_s:.2f} s of {own.wall_s:.1f} s in {CYCLE_STEPS} cycles of "
        f"{own.wall_s / CYCLE_STEPS:.2f} s, at the calculator's own settings",
        details={
            "seconds_by_slot": own.seconds,
            "wall_s": own.wall_s,
            "proofs": own.run.summary["sync_proofs"],
        },
    )


@pytest.mark.figure("publish_share_of_cycle")
def test_publish_share_of_a_cycle(agent, own_run, tmp_path):
    """The ledger has what publishing took of the learner. Of a worker it has the proof and the wait
    for the batch it is sampling, in which nothing is lost: so a proof is timed by itself. The two
    sides work at once, so the share is that of the side which spends more; their sum is told."""
    proof_s = seconds_of_a_proof(agent, own_run.config, tmp_path)
    published_s, proofs = own_run.seconds["learner"]["sync"], own_run.run.summary["sync_proofs"]
    waited_s = sum(s.get("sync", 0.0) for s in own_run.seconds.values())
    assert published_s > 0
    assert proof_s > 0
    share_of_cycle(
        "publish_share_of_cycle",
        own_run,
        max(published_s, proofs * proof_s),
        0.03,
        f"the learner: {published_s:.2f} s of publishing, {published_s / own_run.wall_s:.1%}; the "
        f"worker: {proofs} × {1000 * proof_s:.0f} ms of load, hash and canary, "
        f"{proofs * proof_s / own_run.wall_s:.1%}; both added up, as if one waited for the other, "
        f"{(published_s + proofs * proof_s) / own_run.wall_s:.1%} (with the waits for a batch in "
        f"the making {waited_s / own_run.wall_s:.1%})",
    )


def seconds_of_a_proof(agent: Agent, config: PipelineConfig, folder: Path) -> float:
    """Median seconds in which one idle worker takes a publish and proves it, on one thread."""
    rows = agent.rows("multi", "train")
    runtime = InlineRuntimeDriver(config, agent.snapshot, agent.sft.sha256, rows)

    async def timed() -> list[float]:
        await runtime.start()
        torch.set_num_threads(1)
        receipt = await runtime.publish(folder / "publish", 0)
        took = []
        for _ in range(PROOFS):
            started_s = time.perf_counter()
            await runtime.sync(0, receipt)
            took.append(time.perf_counter() - started_s)
        await runtime.stop()
        return took

    return statistics.median(asyncio.run(timed()))


@pytest.mark.figure("checkpoint_share_of_cycle")
def test_checkpoint_share_of_a_cycle(own_run):
    taken_s = own_run.seconds["learner"]["checkpoint"]
    assert taken_s > 0
    share_of_cycle("checkpoint_share_of_cycle", own_run, taken_s, 0.05, "a checkpoint every step")
