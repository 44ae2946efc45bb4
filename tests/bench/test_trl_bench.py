"""Time to a held-out accuracy: this project's engine over TRL's GRPOTrainer.

Same machine, snapshot, prompts, verifier, sampling, adapter, batch, group, optimiser and clip. Both
sides are judged at temperature 1 on the same held-out problems, outside both clocks, which start
with the first sample.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from async_agent import Judge, Reached, merged, ratio_of_medians, run_rl, time_to
from async_tasks import Agent, make_agent

from configs.schema.rl_tools import LogNormalLatency
from tests.figures.record import record

if TYPE_CHECKING:
    from trl_side import Watch

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

T = TypeVar("T")
SEEDS = (0, 1, 2)
PROBLEMS = 256
CORES = 2
LATENCY = LogNormalLatency(median_s=0.3, sigma=1.0, max_s=10.0)


@dataclass(frozen=True)
class Race:
    """One comparison."""

    figure: str
    task: str
    target_accuracy: float
    target_ratio: float
    ours_steps: int
    """Taken by this project's side, whatever they reach; TRL stops where it reaches the target."""
    trl_steps: int
    every: int
    """Steps between two looks at either side; a multiple of the publish interval."""
    settings: dict[str, Any]
    """Of this project's engine alone."""


MULTI = Race(
    figure="trl_multi_turn_time_to_accuracy",
    task="multi",
    target_accuracy=0.7,
    target_ratio=2.0,
    ours_steps=20,
    trl_steps=30,
    every=1,
    settings={
        "staleness_limit": 4,
        "tools": {"simulated_latency": LATENCY.model_dump()},
    },
)
SINGLE = Race(
    figure="trl_single_turn_time_to_accuracy",
    task="single",
    target_accuracy=0.45,
    target_ratio=1.3,
    ours_steps=22,
    trl_steps=36,
    every=2,
    settings={"staleness_limit": 2, "publish": {"start": 2, "end": 2}},
)


@pytest.fixture(scope="module")
def agent() -> Agent:
    return make_agent()


def ours(agent: Agent, race: Race, seed: int, judge: Judge, out: Path) -> Reached:
    """This project's engine: generator and learner beside each other, one thread each."""
    settings = {"steps": race.ours_steps, "seed": seed, "checkpoint_every": race.ours_steps}
    overrides = {"rl": merged(settings, race.settings)}
    run = in_a_fresh_process(run_rl, agent, race.task, overrides, out)
    return time_to(race.target_accuracy, run.moments, judge, race.every)


def in_a_fresh_process(call: Callable[..., T], *arguments: Any) -> T:
    """What a call gives, in a process that never imported TRL: with it comes Ray, which reads once,
    at import, the settings this project gives it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def theirs(agent: Agent, race: Race, seed: int, judge: Judge, threads: int, out: Path) -> "Watch":
    """TRL, up to the target."""
    from trl_side import SlowCalculator, train  # seconds to import, for these benches alone

    return train(
        agent,
        race.task,
        {},
        out,
        steps=race.trl_steps,
        seed=seed,
        threads=threads,
        calculator=SlowCalculator(LATENCY if race.task == "multi" else None, seed),
        judge=judge,
        target=race.target_accuracy,
        every=race.every,
    )


def best_threads(agent: Agent, task: str, out: Path) -> tuple[int, dict[int, float]]:
    """Threads with which TRL is fastest here, and seconds of a step with each."""
    from trl_side import SlowCalculator, train  # seconds to import, for these benches alone

    step_s = {}
    for threads in range(1, CORES + 1):
        watch = train(
            agent,
            task,
            {},
            out / f"threads-{threads}",
            steps=3,
            seed=9,
            threads=threads,
            calculator=SlowCalculator(None),
        )
        step_s[threads] = watch.work_s[2] - watch.work_s[1]
    return min(step_s, key=step_s.__getitem__), step_s


def run_race(race: Race, agent: Agent, folder: Path) -> dict[str, Any]:
    """Both sides for every seed; gives what there is to record."""
    judge = Judge(agent, race.task, problems=PROBLEMS)
    threads, step_s = best_threads(agent, race.task, folder)
    start = judge.accuracy(None)
    assert start < race.target_accuracy, "the snapshot is at the target already"
    by_seed = []
    for seed in SEEDS:
        mine = ours(agent, race, seed, judge, folder / f"ours-{seed}")
        watch = theirs(agent, race, seed, judge, threads, folder / f"trl-{seed}")
        other, at_once = watch.reached(), watch.reached(concurrent=True)
        print(f"\nseed {seed}: ours {mine}\nTRL {other}\nits tools beside each other {at_once}")
        by_seed.append(
            {
                "seed": seed,
                "ours": asdict(mine),
                "trl": asdict(other),
                "trl_tools_beside_each_other_s": at_once.seconds,
            }
        )
    return {
        "start_accuracy": start,
        "target_accuracy": race.target_accuracy,
        "trl_threads": threads,
        "trl_step_s_by_threads": step_s,
        "by_seed": by_seed,
    }


def decide(race: Race, found: dict[str, Any]) -> None:
    """Record the ratio of the medians."""
    ours_s = [s["ours"]["seconds"] for s in found["by_seed"]]
    trl_s = [s["trl"]["seconds"] for s in found["by_seed"]]
    at_once_s = [s["trl_tools_beside_each_other_s"] for s in found["by_seed"]]
    ratio = ratio_of_medians(ours_s, trl_s)
    kinder = ratio_of_medians(ours_s, at_once_s)
    found["ratio_with_trl_tools_beside_each_other"] = kinder
    waits = (
        f"; TRL calls the tools of one sample after those of another, were a batch's waits beside "
        f"each other it would be {said(kinder)} ×"
        if race.task == "multi"
        else ""
    )
    record(
        race.figure,
        value=ratio,
        met=ratio is not None and ratio >= race.target_ratio,
        seeds=SEEDS,
        note=f"seconds to {race.target_accuracy:.0%} from {found['start_accuracy']:.0%}: ours "
        f"{', '.join(map(said, ours_s))}, TRL {version('trl')} {', '.join(map(said, trl_s))}"
        f"{waits}; TRL: generate of transformers, β = 0, one generation batch a step, no gradient "
        f"checkpointing, float32, {found['trl_threads']} thread(s), its faster choice of {CORES}; "
        "ours: two processes of one thread, samples without advantage left out",
        details=found,
    )


def said(seconds: float | None) -> str:
    """A number for a note."""
    return "never" if seconds is None else f"{seconds:.1f}"


@pytest.mark.figure(MULTI.figure)
def test_multi_turn_time_to_accuracy(agent, tmp_path):
    added_waits_are_real_waits(agent, tmp_path / "check")
    decide(MULTI, run_race(MULTI, agent, tmp_path))


@pytest.mark.figure(SINGLE.figure)
def test_single_turn_time_to_accuracy(agent, tmp_path):
    decide(SINGLE, run_race(SINGLE, agent, tmp_path))


def added_waits_are_real_waits(agent: Agent, folder: Path) -> None:
    """Asleep or added to the clock, TRL's waits for tools take the same seconds.

    Small batches with the same seed: what is left of the clock without waits is the same work.
    """
    from trl_side import SlowCalculator, train  # seconds to import, for these benches alone

    watches = {}
    for sleep in (False, True):
        watches[sleep] = train(
            agent,
            "multi",
            {"rl": {"batch_size": 16, "group_size": 8}},
            folder / str(sleep),
            steps=3,
            seed=5,
            threads=1,
            calculator=SlowCalculator(LATENCY, 5, sleep=sleep),
        )
    waited = [total for total, _ in watches[True].waits]
    assert waited == [total for total, _ in watches[False].waits], "not the same episodes"
    assert sum(waited[1:]) > 1, "too little to wait for to tell"
    asleep = watches[True].work_s[-1] - watches[True].work_s[0]
    added = watches[False].seconds(3) - watches[False].seconds(1)
    print(f"\nwaits of {sum(waited[1:]):.1f} s: asleep {asleep:.2f} s, added {added:.2f} s")
    assert asleep == pytest.approx(added, rel=0.15, abs=0.5)
