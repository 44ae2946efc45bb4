"""Fifty random promote, rollback and candidate steps, most of them killed half-way.

Each step runs in a process of its own against a real MLflow store; it is killed with SIGKILL inside
the ledger's append, between ledger and aliases, or around each move of an alias. After every step
what a run does at its start is done, and everything must agree.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from configs.schema import PipelineConfig
from flows.promotion.news import move_aliases
from flows.promotion.releases import find_release, ready_ledger
from tasks.artifacts.provenance import module_environment
from tasks.tracking.promotion_ledger import PromotionLedger
from tasks.tracking.registry import aliases
from tests.figures.record import record
from tests.small_releases import write_run

STEPS = 50
SEED = 20260
RUNS = [f"r{number}" for number in range(16)]
KILLS = (
    ["half a line", "before", 1],
    ["line", "before", 1],
    ["line", "after", 1],
    ["head", "after", 1],
    ["follow", "before", 1],
    ["create_registered_model", "after", 1],
    ["create_model_version", "before", 1],
    ["create_model_version", "after", 1],
    ["set_model_version_tag", "after", 2],
    ["set_registered_model_alias", "before", 1],
    ["set_registered_model_alias", "after", 1],  # previous moved, champion not yet
    ["set_registered_model_alias", "after", 2],
    ["delete_registered_model_alias", "before", 1],
    ["delete_registered_model_alias", "after", 1],
)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Packaged runs, nothing promoted."""
    for name in ("RL_PIPELINE_SIGNING_KEY", "MLFLOW_TRACKING_URI", "RL_PIPELINE_ALERT_URLS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "runs"
    for name in RUNS:
        write_run(folder, name)
    return folder


@pytest.fixture
def stepper(runs):
    """Take a step in a process of its own: `stepper(step) -> {signal, acknowledged}`."""
    child = Path(__file__).with_name("promotion_child.py")
    process = subprocess.Popen(
        [sys.executable, str(child), str(runs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
    )

    def take(step: dict) -> dict:
        process.stdin.write(json.dumps(step) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield take
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def choose(rng: random.Random, ledger: PromotionLedger, kill) -> dict:
    """A step that can be taken now; a rollback where the kill point is reached by one."""
    state = ledger.state()
    event = kill[0] if kill else ""
    champion = state.champion.run_id if state.champion else None
    known = {release.run_id for release in state.releases}
    names = [run for run in RUNS if run != champion]
    if event == "create_model_version":
        names = [run for run in names if run not in known] or names
    acts = ["promote", "promote", "candidate", "reject"]
    if event == "set_registered_model_alias":
        acts = ["promote"]
    if state.previous is not None:
        acts += ["rollback"] * 2
        if event == "delete_registered_model_alias":
            acts = ["rollback"]
    return {"act": rng.choice(acts), "name": rng.choice(names), "kill": kill}


def standing(ledger: PromotionLedger) -> tuple[str | None, str | None]:
    """Champion and previous, by bundle."""
    state = ledger.state()
    return tuple(r and r.bundle_sha256 for r in (state.champion, state.previous))


def expected(step: dict, before: tuple, runs: Path) -> tuple:
    """Champion and previous after the step, if it counts."""
    if step["act"] == "rollback":
        return before[1], None
    if step["act"] == "promote":
        return find_release(runs, step["name"]).bundle_sha256, before[0]
    return before


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.figure("promotion_ledger")
def test_promotion_ledger_after_random_steps_and_kills(runs, stepper):
    from mlflow import MlflowClient

    rng = random.Random(SEED)
    ledger, config = PromotionLedger(runs, "calc"), PipelineConfig(profile="calc")
    client = MlflowClient(tracking_uri=f"sqlite:///{runs.resolve() / 'mlflow.db'}")
    client.search_experiments()  # makes the store
    plan = [kill for _ in range(3) for kill in rng.sample(KILLS, len(KILLS))]
    plan = rng.sample([*plan, *[None] * (STEPS - len(plan))], STEPS)
    good, killed, torn, acts = 0, Counter(), 0, Counter()
    for kill in plan:
        before, count = standing(ledger), len(ledger.entries())
        step = choose(rng, ledger, kill)
        after = expected(step, before, runs)
        done = stepper(step)
        assert done["signal"] in (0, 9), (step, done)
        assert (done["signal"] == 9) <= (kill is not None)
        if done["signal"] == 9:
            killed[" ".join(map(str, kill))] += 1
        acts[step["act"]] += 1
        aliases_now = aliases(client, "calc")
        served = ledger.state().served
        in_between = set(aliases_now.values()) <= served | {before[0]}

        ready_ledger(runs, "calc")
        problem = move_aliases(ledger, config, runs)
        entries = ledger.verify()
        torn = len(list(ledger.path.parent.glob("*.torn-*")))
        counts = entries > count
        now = standing(ledger)
        wanted = {n: s for n, s in zip(("champion", "previous"), now, strict=True) if s}
        good += all(
            (
                problem is None,
                in_between,
                entries in (count, count + 1),
                counts or not done["acknowledged"],  # what was acknowledged is there
                now == (after if counts else before),
                aliases(client, "calc") == wanted,
            )
        )
    versions = {v.tags["bundle.sha256"] for v in client.search_model_versions("name = 'calc'")}
    known = {r.bundle_sha256 for r in ledger.state().releases}
    once = len(client.search_model_versions("name = 'calc'")) == len(known)
    assert killed.total() >= 20, killed
    assert torn >= 1
    met = good == STEPS and versions == known and once
    record(
        "promotion_ledger",
        value=good / STEPS,
        met=met,
        seeds=[SEED],
        note=f"{killed.total()} of {STEPS} steps killed with SIGKILL at {len(killed)} of "
        f"{len(KILLS)} points, {torn} half-written lines put aside, {ledger.verify()} entries",
        details={"killed": dict(killed), "acts": dict(acts), "entries": ledger.verify()},
    )
    assert met, (good, versions ^ known, once)
