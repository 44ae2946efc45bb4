"""The loop's books: seconds that balance, shares, and what a step tells."""

import json
import time
from dataclasses import replace

import pytest
from sleepy_runtime import SleepyRuntime

from tasks.rl.ledger import SampleFate

PACE = {
    "start": 0.1, "play": 0.08, "grade": 0.02, "train": 0.08, "sync": 0.02, "publish": 0.02,
    "save": 0.05,
}  # fmt: skip


@pytest.mark.parametrize(("limit", "workers"), [(0, 1), (2, 1), (2, 3)])
def test_the_books_balance(run_of, machine_time, limit, workers):
    runtime = SleepyRuntime(limit, workers, PACE)
    run = run_of(runtime, steps=8, checkpoint_every=4).go(machine_time.loop)
    balance = run.state.ledger.balance(run.loop.wall_s())
    assert balance.slots == 1 + workers
    assert balance.balanced, str(balance)
    states = run.state.ledger.seconds_by_state()
    assert set(states) >= {"startup", "rollout", "grade", "train", "sync", "checkpoint", "idle"}
    for state, call in (("rollout", "play"), ("train", "train"), ("grade", "grade")):
        spent_s = runtime.spent_s[call]
        assert states[state] <= 1.1 * spent_s + 0.05, state
        if call == "train" or limit == 0:  # else plays overlap, and a moment is booked once
            assert spent_s <= states[state], state


@pytest.mark.parametrize("at_work", [False, True])
@pytest.mark.parametrize("pause_s", [0.01, 0.05])
def test_a_pause_nobody_logged_breaks_the_balance(
    run_of, monkeypatch, machine_time, pause_s, at_work
):
    """It is missing where it was made, and nowhere else: the others logged what they did then."""
    run = run_of(SleepyRuntime(2, 1, PACE), steps=8)
    training, pauses = run.loop.consumer._training, []

    async def slow(samples: int) -> None:
        until_s = time.monotonic() + pause_s
        if not at_work:
            machine_time.sleep(pause_s)
        while time.monotonic() < until_s:
            pass
        pauses.append(pause_s)
        await training(samples)

    monkeypatch.setattr(run.loop.consumer, "_training", slow)
    run.go(machine_time.loop)
    balance = run.state.ledger.balance(run.loop.wall_s())
    assert len(pauses) >= 16 and not balance.balanced
    missing_s = balance.missing_s_by_slot
    assert missing_s["learner"] == pytest.approx(sum(pauses), abs=0.01 * balance.wall_s)
    assert missing_s["rollout-0"] == pytest.approx(0, abs=0.01 * balance.wall_s)


def test_busy_slots_that_learn_less_are_flagged(run_of):
    runtime = SleepyRuntime(1, 1, {"play": 0.001, "train": 0.001})
    runtime.shares_device = True  # one device in turns is never idle
    train = runtime.train

    async def worth_less(*call):
        report = await train(*call)
        share = 0.8 if report.learner_version <= 8 else 0.1
        return replace(report, metrics=report.metrics | {"effective_share": share})

    runtime.train = worth_less
    run = run_of(runtime, steps=16).go()
    shown = [m["values"] for m in run.metrics]
    assert [values["utilisation"] for values in shown] == [1.0] * 16
    assert run.state.meter.counts["divergences"] == 1 == shown[-1]["divergences"]
    assert "divergences" not in shown[9]


def test_a_slot_that_waits_is_not_utilised(run_of, machine_time):
    runtime = SleepyRuntime(0, 1, {"play": 0.04, "train": 0.04})
    run = run_of(runtime).go(machine_time.loop)
    shares = [m["values"]["utilisation"] for m in run.metrics]
    assert 0.3 < sum(shares) / len(shares) < 0.8  # two slots, one of them idle all the time


def test_shares_and_metrics_of_a_finished_run(run_of):
    run = run_of(SleepyRuntime(1, 1, {"play": 0.002, "train": 0.002})).go()
    assert run.state.ledger.share(SampleFate.TRAINED) == 1.0
    assert run.state.meter.counts["samples"] == 64 and run.state.meter.effective_samples == 8.0
    last = run.metrics[-1]["values"]
    assert {"staleness_mean", "staleness_max", "overlap_share", "temperature"} <= set(last)
    assert last["mixed_groups_share"] == 1.0 and last["generated_tokens_mean"] == 2.0
    progress = json.loads((run.folder / "progress.json").read_text())
    assert (progress["done"], progress["total"]) == (8, 8)
