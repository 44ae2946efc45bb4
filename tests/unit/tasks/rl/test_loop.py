"""The two coroutines under any speeds: bounded staleness, no deadlock, nothing lost or doubled."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sleepy_runtime import SleepyRuntime

from tasks.artifacts.progress import Reporter, read_metrics
from tasks.rl.checkpoint import Checkpoints
from tasks.rl.consumer import MAX_EMPTY_BATCHES
from tasks.rl.errors import (
    CheckpointMismatchError,
    NothingToLearnError,
    RefillLimitError,
    RewardShapeError,
    SyncProofError,
    TooManyWorkersLostError,
    WorkerLostError,
)
from tasks.rl.exchange import slots_of
from tasks.rl.ledger import SampleFate
from tasks.rl.loop import AsyncLoop
from tasks.rl.loop_state import LoopState
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.sentinel import ProbeResult, SentinelTrippedError

TIMEOUT_S = 5


class Run:
    """One attempt of the loop over a sleepy runtime."""

    def __init__(self, config, runtime, folder, *, resume=False) -> None:
        self.config, self.runtime, self.folder = config.rl, runtime, folder
        queue = PromptQueue([f"row{i}" for i in range(500)], seed=0)
        self.state = LoopState(config.rl, queue, slots_of(runtime))
        self.checkpoints = Checkpoints(folder / "checkpoints", {"config": "c"})
        self.saved = self.checkpoints.latest() if resume else None
        self.state.attempt = self.checkpoints.begin_attempt()
        if self.saved:
            self.state.resume(self.saved)
        self.loop = AsyncLoop(
            config.rl, runtime, self.state, self.checkpoints, folder / "publish", Reporter(folder)
        )

    def go(self) -> "Run":
        asyncio.run(asyncio.wait_for(self.loop.run(self.saved), TIMEOUT_S))
        return self

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.folder / "metrics.jsonl")


@pytest.fixture
def run_of(tiny_config, tmp_path):
    """Build a run: `run_of(runtime, staleness_limit=2, …)`."""

    def build(runtime: SleepyRuntime, /, *, resume=False, folder=tmp_path, **rl) -> Run:
        settings = {
            "steps": 8,
            "checkpoint_every": 100,
            "staleness_limit": runtime.limit,
            "runtime": {"type": "ray", "rollout_workers": runtime.workers},
        } | rl
        return Run(tiny_config(rl=settings), runtime, folder, resume=resume)

    return build


def accounts_balance(run: Run, *, refused: bool = False) -> None:
    """Every sample made was trained on, dropped or filtered, or is left over; none is twice."""
    fates = run.state.ledger.to_json(1.0)["samples"]
    trained = run.runtime.trained
    assert len(trained) == len(set(trained)) == fates["trained"]
    left = sum(len(g.rollouts) for g in run.loop.exchange.buffer._groups)
    made = run.runtime.sampled
    assert made == fates["trained"] + fates["dropped"] + fates["filtered"] + left
    serials = Counter(i.split(".")[0] for i in trained)
    sizes = {4: True, 3: refused}  # whole groups, every ticket once
    assert all(sizes.get(n, False) for n in serials.values())
    if not refused:
        assert fates["trained"] == 8 * run.runtime.attempts_at_training and not fates["refused"]
    state = run.state.queue.state_dict()
    unfinished = {t["serial"] for t in (*state["open"], *state["waiting"])}
    closed = set(range(run.state.queue.dispatched)) - unfinished
    assert set(map(int, serials)) <= closed
    if not refused:
        assert len(closed) == len(serials) + fates["filtered"] // 4


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(
    limit=st.integers(0, 4),
    publish=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    workers=st.integers(1, 3),
    play=st.sampled_from([0.0, 0.0005, 0.002]),
    tail=st.sampled_from([1.0, 10.0]),
    train=st.sampled_from([0.0, 0.0005, 0.003]),
    sync=st.sampled_from([0.0, 0.002]),
    buffer=st.fixed_dictionaries(
        {
            "order": st.sampled_from(["freshest", "fifo"]),
            "fresh_share_floor": st.sampled_from([0.0, 0.5, 1.0]),
            "capacity_batches": st.integers(1, 5),
            "when_stale": st.sampled_from(["pause", "lower_lr"]),
        }
    ),
    filtered=st.sampled_from([0, 2, 5]),
    refused=st.booleans(),
    dies=st.booleans(),
    seed=st.integers(0, 99),
)
def test_staleness_stays_bounded_and_nothing_is_lost_at_any_speed(
    run_of,
    tmp_path_factory,
    limit,
    publish,
    workers,
    play,
    tail,
    train,
    sync,
    buffer,
    filtered,
    refused,
    dies,
    seed,
):
    pace = {"play": play, "train": train, "sync": sync, "publish": sync, "grade": play / 3}

    def outcome(serial: int, sample: int) -> float:
        alike = filtered and serial % 7 < filtered
        return 1.0 if alike else float(sample % 2)

    runtime = SleepyRuntime(limit, workers, pace, outcome, seed=seed)
    runtime.tail = tail
    if refused:
        runtime.refuses = lambda serial, sample: serial % 5 == 0 and sample == 2
    if dies:
        runtime.dies = lambda play: play in (3, 9)
    start, end = (min(n, limit + 1) for n in publish)
    run = run_of(
        runtime,
        folder=tmp_path_factory.mktemp("run"),
        publish={"start": start, "end": end, "over_steps": 5},
        buffer=buffer,
        filter="zero_variance" if filtered else "none",
    ).go()
    assert runtime.learner_version == run.state.learner_version == 8
    assert max(runtime.ages) == run.state.meter.max_staleness_seen <= limit
    accounts_balance(run, refused=refused)
    assert [m["step"] for m in run.metrics] == list(range(1, 9))
    assert runtime.revived == run.state.meter.counts["worker_losses"] <= 2 * dies
    assert all(0 < scale <= 1 for scale in runtime.lr_scales) or limit > 0


@pytest.mark.parametrize("workers", [1, 3])
def test_at_limit_0_nothing_is_sampled_in_vain(run_of, workers):
    runtime = SleepyRuntime(0, workers, {"play": 0.002, "train": 0.004})
    run = run_of(runtime).go()
    assert runtime.ages == [0] * len(runtime.ages)
    assert runtime.sampled == 8 * 8 == len(runtime.trained)  # the batch in training counts
    assert run.state.queue.dispatched == 16
    assert not runtime.overlapped


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_with_a_limit_both_sides_work_at_once_and_samples_age(run_of, limit):
    runtime = SleepyRuntime(limit, 1, {"play": 0.004, "train": 0.004})
    run = run_of(runtime, steps=12).go()
    assert runtime.overlapped and 1 <= max(runtime.ages) <= limit
    overlap = run.state.meter.overlap
    assert 0.2 < overlap.both_s / overlap.any_s <= 1
    assert any(m["values"]["staleness_mean"] > 0 for m in run.metrics)


def test_no_worker_runs_ahead_of_what_may_be_trained_on(run_of):
    """A learner that never finishes a step leaves exactly (η + 1) batches made or in training."""
    runtime = SleepyRuntime(2, 2, {"train": 1e6})
    run = run_of(runtime)

    async def some_time() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.loop.run(None), 0.3)

    asyncio.run(some_time())
    assert runtime.sampled == 3 * 8


def test_publishing_less_often_keeps_within_the_limit(run_of):
    runtime = SleepyRuntime(3, 1, {"play": 0.001, "train": 0.001})
    run = run_of(runtime, steps=16, publish={"start": 4, "end": 4}).go()
    assert run.state.meter.counts["proofs"] == 1 + 16 // 4
    assert max(runtime.ages) == 3


def test_an_all_zero_batch_is_never_trained_on_and_the_end_is_named(run_of):
    runtime = SleepyRuntime(1, outcome=lambda serial, sample: 0.0)
    run = run_of(runtime)
    with pytest.raises(NothingToLearnError, match=rf"{MAX_EMPTY_BATCHES} batches.*rl_bands"):
        run.go()
    assert runtime.trained == [] and runtime.learner_version == 0
    fates = run.state.ledger.to_json(1.0)["samples"]
    assert fates["filtered"] == 8 * MAX_EMPTY_BATCHES == 8 * run.state.meter.counts["suspicions"]


@pytest.mark.parametrize("limit", [0, 2])
def test_empty_batches_between_good_ones_are_filtered_and_the_run_goes_on(run_of, limit):
    runtime = SleepyRuntime(
        limit, 1, {"play": 0.001}, outcome=lambda serial, i: float(i % 2) * (serial // 4 % 2)
    )
    run = run_of(runtime, buffer={"order": "fifo"}).go()
    assert runtime.learner_version == 8
    accounts_balance(run)
    assert run.state.ledger.to_json(1.0)["samples"]["filtered"] >= 8


def test_a_failed_probe_stops_the_run_and_leaves_the_last_checkpoint(run_of):
    good = 8 * 3 // 4  # tickets of the first three steps
    runtime = SleepyRuntime(0, outcome=lambda serial, i: float(i % 2) if serial < good else 0.0)
    runtime.probes = [ProbeResult("number-0", 1.0, 1.0), ProbeResult("number-1", 0.0, 1.0)]
    run = run_of(runtime, checkpoint_every=1)
    with pytest.raises(SentinelTrippedError, match="number-1"):
        run.go()
    assert runtime.learner_version == 3
    saved = run.checkpoints.latest()
    assert saved.step == 3 and not saved.loop["sentinel"]["failed_probes"]
    repaired = SleepyRuntime(0)
    again = run_of(repaired, resume=True, checkpoint_every=1).go()
    assert repaired.learner_version == 8 and again.state.attempt == 1
    assert {v.attempt for v in repaired.engine} == {1}


def test_an_engine_that_cannot_prove_its_weights_stops_the_run(run_of):
    runtime = SleepyRuntime(1, 2, {"play": 0.001})
    sync = runtime.sync

    async def fails_at_step_3(worker, receipt):
        if receipt.version.step >= 3:
            raise SyncProofError("the engine holds other weights")
        return await sync(worker, receipt)

    runtime.sync = fails_at_step_3
    with pytest.raises(SyncProofError):
        run_of(runtime).go()
    assert all(version.step < 3 for version in runtime.engine)
    assert runtime.learner_version < 8


@pytest.mark.parametrize("limit", [0, 3])
def test_a_skipped_step_takes_no_version_and_the_run_still_ends(run_of, limit):
    runtime = SleepyRuntime(limit, 2, {"play": 0.001, "train": 0.001})
    runtime.skip_steps = {1, 4, 5}
    run = run_of(runtime, checkpoint_every=1).go()
    assert runtime.learner_version == 8 and runtime.attempts_at_training == 11
    assert run.state.meter.counts["skipped_steps"] == 3
    assert run.checkpoints.latest().step == 8
    accounts_balance(run)


@pytest.mark.parametrize(("limit", "workers"), [(0, 1), (2, 1), (3, 2)])
def test_killed_and_resumed_no_prompt_is_trained_on_twice_and_none_is_lost(run_of, limit, workers):
    class Killed(BaseException):
        """Stands for SIGKILL."""

    pace = {"play": 0.001, "train": 0.001}
    kept, runtime = [], None
    for kill_at in (3, 6, None):
        runtime = SleepyRuntime(limit, workers, pace)
        train = runtime.train

        async def dying(*arguments, train=train, runtime=runtime, kill_at=kill_at):
            if runtime.learner_version == kill_at:
                raise Killed
            return await train(*arguments)

        runtime.train = dying
        run = run_of(runtime, resume=True, checkpoint_every=2)
        first = run.state.learner_version
        try:
            run.go()
        except Killed:
            assert run.checkpoints.latest().step == kill_at // 2 * 2
        batches = [runtime.trained[i : i + 8] for i in range(0, len(runtime.trained), 8)]
        lasting = (kill_at or 8) // 2 * 2 - first  # later ones died with the weights they made
        kept += [i for batch in batches[:lasting] for i in batch]
    assert runtime.learner_version == 8 and run.state.attempt == 2
    tickets = Counter(i.split(".")[0] for i in kept)
    assert len(kept) == 64 and all(n == 4 for n in tickets.values())
    if limit == 0:
        assert sorted(map(int, tickets)) == list(range(16))
    assert [m["step"] for m in run.metrics][-1] == 8
    assert run.state.ledger.to_json(1.0)["samples"]["trained"] == 64


def test_a_learner_that_comes_back_different_is_refused(run_of):
    runtime = SleepyRuntime(0)
    run_of(runtime, checkpoint_every=4, steps=4).go()
    again = SleepyRuntime(0)

    async def other(folder, steps_taken):
        return {"policy": "else"}

    again.load = other
    with pytest.raises(CheckpointMismatchError, match="differ from the manifest"):
        run_of(again, resume=True, checkpoint_every=4, steps=8).go()


def test_a_dead_worker_is_replaced_and_its_prompts_are_dispatched_again(run_of):
    runtime = SleepyRuntime(2, 2, {"play": 0.002, "train": 0.002, "start": 0.005})
    runtime.dies = lambda play: play in (4, 12)
    run = run_of(runtime).go()
    assert runtime.revived == run.state.meter.counts["worker_losses"] == 2
    assert runtime.learner_version == 8
    accounts_balance(run)
    assert any(int(i.split(".")[1]) > 0 for i in runtime.trained)  # reissued, then trained on
    assert run.metrics[-1]["values"]["worker_losses"] == 2


def test_a_worker_that_dies_over_the_last_publish_is_replaced_too(run_of):
    """Whoever samples the finished policy has to hold it."""

    class DiesAtTheEnd(SleepyRuntime):
        async def sync(self, worker, receipt):
            if receipt.version.step == 8 and not self.revived:
                raise WorkerLostError(worker, "killed")
            return await super().sync(worker, receipt)

    run = run_of(DiesAtTheEnd(1)).go()
    assert run.runtime.revived == run.state.meter.counts["worker_losses"] == 1
    assert run.runtime.proven == [8]


def test_more_losses_than_allowed_end_the_run_by_name(run_of):
    runtime = SleepyRuntime(1, 1, {"play": 0.001})
    runtime.dies = lambda play: play % 3 == 0
    runtime_settings = {"type": "ray", "max_worker_losses": 1}
    with pytest.raises(TooManyWorkersLostError, match=r"max_worker_losses=1: 2 .*killed"):
        run_of(runtime, runtime=runtime_settings).go()
    assert runtime.revived == 1


def test_a_hung_episode_is_given_up_and_the_others_go_on(run_of):
    runtime = SleepyRuntime(2, 1, {"play": 0.002, "train": 0.002})
    runtime.hangs = lambda play: play == 5
    run = run_of(runtime, steps=24, play_timeout_s=0.05).go()
    counts = run.state.meter.counts
    assert (counts["overdue_plays"], counts["worker_losses"]) == (1, 0)  # the worker gave signs
    assert runtime.learner_version == 24
    accounts_balance(run)


def test_a_worker_that_finishes_nothing_is_replaced(run_of):
    runtime = SleepyRuntime(1, 1, {"play": 0.001, "train": 0.001})
    runtime.hangs = lambda play: 5 <= play < 9 and not runtime.revived
    run = run_of(runtime, play_timeout_s=0.05).go()
    assert runtime.revived == run.state.meter.counts["worker_losses"] == 1
    assert runtime.learner_version == 8
    accounts_balance(run)


def test_a_prompt_that_hangs_each_time_is_given_up_for_good(run_of):
    runtime = SleepyRuntime(0, 1, {"train": 0.001})
    runtime.workers = 2
    runtime.engine, runtime.proven, runtime.alive = [None] * 2, [-1] * 2, [True] * 2
    play = runtime.play

    async def hangs_on_ticket_3(worker, tickets, samples, temperature):
        if any(t.serial == 3 for t in tickets):
            await asyncio.sleep(1e6)
        return await play(worker, tickets, samples, temperature)

    runtime.play = hangs_on_ticket_3
    losses = {"type": "ray", "rollout_workers": 2, "max_worker_losses": 9}
    run = run_of(runtime, play_timeout_s=0.03, runtime=losses).go()
    counts = run.state.meter.counts
    assert (counts["overdue_plays"], counts["abandoned_prompts"]) == (4, 1)
    assert runtime.learner_version == 8 and "3" not in {i.split(".")[0] for i in runtime.trained}


def test_episodes_carried_over_a_publish_age_by_their_first_token(run_of):
    runtime = SleepyRuntime(3, 1, {"play": 0.004, "train": 0.002}, seed=1)
    run = run_of(runtime, steps=16).go()
    carried = run.state.meter.counts["carried_episodes"]
    assert 0 < carried <= run.state.meter.counts["episodes"]
    assert any(m["values"].get("carried_share", 0) > 0 for m in run.metrics)
    assert max(runtime.ages) <= 3


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_too_little_fresh_lowers_the_learning_rate_where_asked(run_of, order):
    runtime = SleepyRuntime(3, 1, {"play": 0.001, "train": 0.004})
    buffer = {"order": order, "fresh_share_floor": 1.0, "when_stale": "lower_lr"}
    run_of(runtime, steps=16, buffer=buffer).go()
    assert set(runtime.lr_scales) <= {
        0.0,
        0.5,
        1.0,
    }  # of the two groups of a batch, none, one, both
    assert min(runtime.lr_scales) < 1


def test_groups_without_contrast_are_refilled(run_of):
    runtime = SleepyRuntime(
        1, 1, {"play": 0.001, "train": 0.001}, lambda serial, i: float(i % 2 and serial % 2)
    )
    run = run_of(runtime, filter="zero_variance").go()
    assert all(int(i.split(".")[0]) % 2 for i in runtime.trained)
    assert all(m["values"]["mixed_groups_share"] == 1 for m in run.metrics)
    accounts_balance(run)
    assert run.state.ledger.to_json(1.0)["samples"]["filtered"] >= 8 * 7


def test_a_filter_that_throws_everything_away_ends_the_run_by_name(run_of):
    runtime = SleepyRuntime(1, outcome=lambda serial, i: 1.0)
    run = run_of(runtime, filter="zero_variance", max_refill_factor=3)
    with pytest.raises(RefillLimitError, match=r"28 samples were filtered .*rl_bands"):
        run.go()  # 3 batches of 8 may go, the seventh group is one too many
    assert runtime.trained == []


def test_refused_samples_are_left_out_and_their_group_goes_on(run_of):
    runtime = SleepyRuntime(1, 1, {"play": 0.001, "train": 0.001})
    runtime.refuses = lambda serial, i: serial % 2 == 0 and i == 3
    run = run_of(runtime).go()
    assert not any(i.endswith(".3") and int(i.split(".")[0]) % 2 == 0 for i in runtime.trained)
    counts = run.state.meter.counts
    assert counts["refused_samples"] == run.state.ledger.to_json(1.0)["samples"]["refused"] > 0
    assert counts["samples"] == len(runtime.trained) < 64
    accounts_balance(run, refused=True)


def test_an_engine_whose_every_answer_is_refused_ends_the_run_by_name(run_of):
    runtime = SleepyRuntime(1)
    runtime.refuses = lambda serial, i: True
    with pytest.raises(RefillLimitError, match=r"samples were refused .*Check the engine"):
        run_of(runtime).go()


def test_a_grader_that_answers_for_fewer_is_named(run_of):
    runtime = SleepyRuntime(0)
    grade = runtime.grade

    async def forgets_one(worker, rollouts):
        return await grade(worker, rollouts[:-1])

    runtime.grade = forgets_one
    with pytest.raises(RewardShapeError, match=r"group 1 \(row row\d+\).*3 of 4 samples"):
        run_of(runtime).go()


def test_a_batch_trained_on_for_several_steps_keeps_within_the_limit(run_of):
    runtime = SleepyRuntime(2, 1, {"play": 0.001, "train": 0.001})
    train = runtime.train

    async def twice(*call):
        report = await train(*call)
        runtime.learner_version += 1
        return replace(report, learner_version=runtime.learner_version)

    runtime.train = twice
    loss = {"type": "decoupled_ppo"}
    run = run_of(runtime, steps=16, updates_per_batch=2, loss=loss, checkpoint_every=5).go()
    assert run.state.learner_version == 16 and runtime.attempts_at_training == 8
    assert max(runtime.ages) == 2 and set(runtime.ages) == {0, 2}
    assert [p.name for p in sorted((run.folder / "checkpoints").glob("step-*"))][
        -1
    ] == "step-000016"


PACE = {
    "start": 0.1, "play": 0.08, "grade": 0.02, "train": 0.08, "sync": 0.02, "publish": 0.02,
    "save": 0.05,
}  # fmt: skip


@pytest.mark.parametrize(("limit", "workers"), [(0, 1), (2, 1), (2, 3)])
def test_the_books_balance(run_of, limit, workers):
    runtime = SleepyRuntime(limit, workers, PACE)
    run = run_of(runtime, steps=8, checkpoint_every=4).go()
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


def test_a_pause_nobody_logged_breaks_the_balance(run_of, monkeypatch):
    run = run_of(SleepyRuntime(2, 1, PACE), steps=8)
    training = run.loop.consumer._training

    async def slow(samples: int) -> None:
        time.sleep(0.02)
        await training(samples)

    monkeypatch.setattr(run.loop.consumer, "_training", slow)
    run.go()
    assert not run.state.ledger.balance(run.loop.wall_s()).balanced


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


def test_a_slot_that_waits_is_not_utilised(run_of):
    runtime = SleepyRuntime(0, 1, {"play": 0.004, "train": 0.004})
    run = run_of(runtime).go()
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
