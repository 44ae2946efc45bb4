"""The planner held against the engine: a probe, then a sweep predicted and measured.

Probe and sweep have the same two actors of one thread each, the same agent, prompts, batch and
group. The policy is held still by a small learning rate, for a probe can only tell what samples are
like now; what it is about is how settings change the pace of a loop.
"""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from async_agent import configured, merged, run_rl
from async_tasks import Agent, make_agent

from configs.schema import PipelineConfig
from flows.forecast import forecast, outlook, paired, probings
from tasks.rl.figures import Figures
from tasks.rl.figures_of_runs import figures_of_run
from tasks.rl.planner import WORTH_IT
from tests.figures.record import record

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

STILL: dict[str, Any] = {"optimiser": {"lr": 1.0e-5, "warmup_steps": 5}}
TOOLS = {"tools": {"simulated_latency": {"median_s": 0.15, "sigma": 1.0, "max_s": 3.0}}}
WARM_UP, MEASURED = 4, 12
"""Optimiser steps; as many as may be sampled ahead follow, in which nothing is sampled any more."""
WITHIN = 0.25
"""Largest share by which a prediction may miss."""


def setting(limit: int, interval: int = 1, tools: dict[str, Any] | None = None) -> dict[str, Any]:
    """Overrides of the RL block for one setting of the sweep."""
    steps = WARM_UP + MEASURED + limit + 1
    publish = {"start": interval, "end": interval, "over_steps": 1}
    own = {"steps": steps, "staleness_limit": limit, "publish": publish, "checkpoint_every": steps}
    return {"rl": merged(STILL, own, tools or {})}


PROBED = setting(2)
SWEEP = {
    "η=0": setting(0),
    "η=2": setting(2),
    "η=2 N=3": setting(2, interval=3),
    "η=4": setting(4),
    "η=0 slow tools": setting(0, tools=TOOLS),
    "η=4 slow tools": setting(4, tools=TOOLS),
}
CHOICES = (("η=0", ("η=2", "η=4")), ("η=0 slow tools", ("η=4 slow tools",)))
"""Synchronous settings and the asynchronous ones on the same work."""


@dataclass(frozen=True)
class Pace:
    """Samples a second and the mean age of one setting."""

    samples_per_s: float
    age: float
    load: float | None = None
    """Processes that wanted a core in the run's last minute; where that is more than its own three,
    the figure says as much of the machine as of the planner."""


@pytest.fixture(scope="module")
def agent() -> Agent:
    return make_agent()


def probed(agent: Agent, folder: Path) -> Figures:
    """What `rl-pipeline forecast --probe` would measure at the probed setting."""
    found = []
    for short in probings(configured("multi", PROBED)):
        out = folder / short.profile
        run_rl(agent, "multi", {"rl": short.rl.model_dump(mode="json")}, out)
        found.append(figures_of_run(out, short))
    return paired(*found)


def measured(agent: Agent, overrides: dict[str, Any], folder: Path) -> Pace:
    """A setting as it runs, between its warm-up and its last batches."""
    run = run_rl(agent, "multi", overrides, folder)
    seconds = run.seconds_at(WARM_UP + MEASURED) - run.seconds_at(WARM_UP)
    batch = run.summary["samples"] / run.summary["steps"]
    lines = run.metrics[WARM_UP : WARM_UP + MEASURED]
    age = statistics.fmean(line["values"]["staleness_mean"] for line in lines)
    return Pace(MEASURED * batch / seconds, age, os.getloadavg()[0])


def predicted(config: PipelineConfig, figures: Figures) -> Pace:
    """A setting as the planner sees it."""
    candidate = outlook("", config, figures).candidate
    return Pace(candidate.samples_per_s, candidate.mean_age)


def same_choices(forecasts: dict[str, Pace], runs: dict[str, Pace]) -> dict[str, bool]:
    """Whether the faster of synchronous and asynchronous is the one foreseen, for each work.

    Where neither side was measured to be faster by as much as the planner asks for, there is
    nothing to choose.
    """
    agreed = {}
    for alone, lagged in CHOICES:
        gains = [max(p[n].samples_per_s for n in lagged) / p[alone].samples_per_s
                 for p in (forecasts, runs)]  # fmt: skip
        foreseen, seen = (gain > 1 for gain in gains)
        agreed[alone] = foreseen == seen or 1 / WORTH_IT < gains[1] < WORTH_IT
    return agreed


@pytest.mark.figure("forecast_over_measured")
def test_a_sweep_is_predicted_from_a_probe(agent, tmp_path):
    load = os.getloadavg()[0]
    figures = probed(agent, tmp_path / "probe")
    configs = {name: configured("multi", overrides) for name, overrides in SWEEP.items()}
    forecasts = {name: predicted(config, figures) for name, config in configs.items()}
    runs = {name: measured(agent, SWEEP[name], tmp_path / str(i)) for i, name in enumerate(SWEEP)}
    ratios = {name: forecasts[name].samples_per_s / runs[name].samples_per_s for name in SWEEP}
    agreed = same_choices(forecasts, runs)
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    details = {
        name: {"predicted": vars(forecasts[name]), "measured": vars(runs[name])} for name in SWEEP
    }
    print(f"\n{figures.times}\n{figures.times_in_turns}", *details.items(), agreed, sep="\n")
    record(
        "forecast_over_measured",
        value=ratios[worst],
        met=all(abs(ratio - 1) <= WITHIN for ratio in ratios.values()) and all(agreed.values()),
        note=f"furthest off: {worst}; all: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        + f"; the faster side foreseen for {sum(agreed.values())} of {len(agreed)} works; probes"
        f" of {figures.source.split(', ')[-1]} at η=2 and η=0",
        details={
            "settings": details,
            "choices": agreed,
            "load_at_start": load,
            "times": str(figures.times),
            "times_in_turns": str(figures.times_in_turns),
        },
    )
    assert runs["η=0"].age == 0.0 and runs["η=4"].age > runs["η=2 N=3"].age
    plan = forecast(configs["η=4 slow tools"], figures, None)
    assert plan.devices == 2 and plan.splits
