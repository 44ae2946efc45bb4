"""The modelled loop: never stands still, never too old, and right where it can be worked out."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks.rl.simulate as simulate_module
from configs.schema.rl import PublishSchedule
from tasks.rl.simulate import DeadlockError, NoProgressError, simulate
from tasks.rl.simulated_engines import DecodeSpeed, LatencyMix, LengthMix
from tasks.rl.simulated_work import Modelled, Times, Work, synchronous

TEN_TOKENS = LengthMix(10.0, 0.0, 10)
FLAT = DecodeSpeed(step_s=0.1, per_sequence_s=0.0, max_sequences=10_000, continuous=True)
"""A turn of ten tokens takes one second, however many are decoded."""


def every(steps: int) -> PublishSchedule:
    return PublishSchedule(start=steps, end=steps, over_steps=1)


@st.composite
def works(draw: st.DrawFn) -> Work:
    group = draw(st.integers(1, 4))
    limit = draw(st.integers(0, 6))
    intervals = st.integers(1, limit + 1)
    return Work(
        steps=draw(st.integers(1, 12)),
        batch_size=group * draw(st.integers(1, 4)),
        group_size=group,
        staleness_limit=limit,
        publish=PublishSchedule(start=draw(intervals), end=draw(intervals), over_steps=6),
        checkpoint_every=draw(st.integers(1, 3)),
        capacity_batches=draw(st.integers(1, 5)),
        order=draw(st.sampled_from(["freshest", "fifo"])),
        fresh_share_floor=draw(st.sampled_from([0.0, 0.5, 1.0])),
        updates_per_batch=draw(st.integers(1, 3)),
        turns_mean=draw(st.sampled_from([1.0, 1.5, 3.0])),
        tokens=LengthMix(draw(st.floats(1, 50)), draw(st.floats(0, 2)), 200),
        tool_latency=draw(st.sampled_from([None, LatencyMix(0.3, 1.0, 10.0)])),
        tool_concurrency=draw(st.integers(1, 4)),
        filter_share=draw(st.sampled_from([0.0, 0.3, 0.8])),
    )


@st.composite
def durations(draw: st.DrawFn) -> Times:
    seconds = st.sampled_from([0.0, 0.01, 1.0])
    decode = DecodeSpeed(
        draw(st.sampled_from([0.0001, 0.1])), draw(st.sampled_from([0.0, 0.01])),
        draw(st.integers(1, 9)), draw(st.booleans()),
    )  # fmt: skip
    names = ("train_s", "grade_s", "publish_s", "prove_s", "checkpoint_s")
    return Times(decode, **{name: draw(seconds) for name in names})


@settings(deadline=None, max_examples=400)
@given(works(), durations(), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 3))
def test_never_stands_still_and_nothing_trained_is_too_old_or_of_the_future(
    work, times, workers, lockstep, one_device, seed
):
    modelled = simulate(work, times, workers, lockstep=lockstep, one_device=one_device, seed=seed)
    batches = -(-work.steps // work.updates_per_batch)
    assert len(modelled.step_ends_s) == batches
    assert list(modelled.step_ends_s) == sorted(modelled.step_ends_s)
    assert len(modelled.ages) == batches * work.batch_size // work.group_size
    assert min(modelled.ages) >= 0 and max(modelled.ages) <= work.staleness_limit
    assert modelled.max_running <= (work.staleness_limit + 1) * work.batch_size
    assert modelled.rollout_s <= modelled.workers_busy_s <= workers * modelled.wall_s + 1e-9
    if work.staleness_limit == 0 or one_device:
        assert modelled.both_s == 0.0
    if work.staleness_limit == 0:
        assert modelled.dropped == 0
    else:
        assert modelled.both_s <= min(modelled.train_s, modelled.rollout_s) + 1e-9


def test_same_seed_same_run_other_seed_other_run():
    work = Work(5, 8, 4, 2, tool_latency=LatencyMix(0.3, 1.0, 10.0), turns_mean=2.0)
    times = Times(FLAT, train_s=0.5)
    assert simulate(work, times, seed=1) == simulate(work, times, seed=1)
    assert simulate(work, times, seed=1) != simulate(work, times, seed=2)


def test_synchronous_steps_add_up():
    """1 s of sampling, 8 × 0.01 s of grading, 2 s of training, 0.3 + 0.2 s of sync a step."""
    work = synchronous(Work(3, 8, 4, 5, tokens=TEN_TOKENS, publish=every(3)))
    times = Times(FLAT, train_s=2.0, grade_s=0.01, publish_s=0.3, prove_s=0.2, checkpoint_s=0.0)
    modelled = simulate(work, times, lockstep=True)
    # the first generation holds proven weights; each later one proves anew
    assert modelled.step_ends_s == pytest.approx((3.38, 3.38 + 3.58, 3.38 + 2 * 3.58))
    assert modelled.ages == (0,) * 6
    assert modelled.rollout_s == pytest.approx(3 * 1.08)
    assert modelled.train_s == pytest.approx(6.0)
    assert modelled.samples_per_s(8, warm_up=1) == pytest.approx(8 / 3.58)


def test_the_slower_side_sets_the_pace_when_both_work():
    """Sampling takes 1 s and training 2 s: two seconds a step, not three."""
    work = Work(20, 8, 4, 1, tokens=TEN_TOKENS)
    modelled = simulate(work, Times(FLAT, train_s=2.0))
    gaps = [b - a for a, b in zip(modelled.step_ends_s[2:], modelled.step_ends_s[3:], strict=False)]
    assert gaps == pytest.approx([2.0] * len(gaps))
    assert modelled.dropped == 0 and set(modelled.ages[2:]) == {1}


def test_a_checkpoint_is_written_when_due():
    work = Work(4, 4, 4, 0, tokens=TEN_TOKENS, checkpoint_every=2)
    modelled = simulate(work, Times(FLAT, train_s=1.0, checkpoint_s=10.0))
    # the workers go on while the learner writes: after step 2 the next batch waits for it
    assert modelled.step_ends_s == pytest.approx((2.0, 14.0, 15.0, 27.0))


def test_continuous_decoding_shares_the_worker():
    """Two sequences of 10 and 20 tokens, a step of n sequences takes n × 0.1 s: 10 steps of 0.2 s,
    then the longer one alone for 10 of 0.1 s."""
    speed = DecodeSpeed(0.0, 0.1, 8, continuous=True)
    work = Work(1, 2, 1, 0, tokens=TEN_TOKENS)
    modelled = simulate(work, Times(speed, train_s=0.0))
    assert modelled.wall_s == pytest.approx(10 * 0.2)  # both have ten tokens
    one_by_one = replace(speed, max_sequences=1)
    assert simulate(work, Times(one_by_one, train_s=0.0)).wall_s == pytest.approx(20 * 0.1)


def test_a_batch_lasts_as_long_as_its_longest():
    """Ten tokens each: 10 steps of 0.5 s, and 0.01 s for each of 40 tokens; twice where only half
    of the four fit."""
    work = Work(1, 4, 4, 0, tokens=TEN_TOKENS)
    speed = DecodeSpeed(0.5, 0.01, 4, continuous=False)
    assert simulate(work, Times(speed, 0.0)).wall_s == pytest.approx(5.0 + 0.4)
    halved = replace(speed, max_sequences=2)
    assert simulate(work, Times(halved, 0.0)).wall_s == pytest.approx(2 * 5.0 + 0.4)


def test_in_lockstep_everyone_waits_for_the_slowest_tool_and_alone_nobody():
    """Two turns of 1 s, a tool of exactly 3 s between them; one call at a time is answered."""
    work = Work(1, 2, 1, 0, turns_mean=2.0, tokens=TEN_TOKENS, tool_concurrency=1)
    work = replace(work, tool_latency=LatencyMix(3.0, 0.0, 10.0))
    # 1 + 3 + 3 + 1 for the one that waits for the tool; the other is through after 5 s
    assert simulate(work, Times(FLAT, 0.0), lockstep=True).wall_s == pytest.approx(8.0)
    by_group = simulate(work, Times(FLAT, 0.0))
    assert by_group.wall_s == pytest.approx(8.0)
    assert by_group.rollout_s == pytest.approx(8.0)
    cut = replace(work, tool_latency=LatencyMix(3.0, 0.0, 0.5), tool_concurrency=2)
    assert simulate(cut, Times(FLAT, 0.0), lockstep=True).wall_s == pytest.approx(2.5)


def test_weights_are_loaded_and_proven_between_batches():
    """Two batches are admitted at once, and only one fits the engine at a time, 2 s each. Training
    takes 0.5 s: step 1 ends at 2.5 s, amid the second batch, and its weights are loaded and proven
    from 4.0 to 4.2 s. The third batch is sampled from 4.2 to 6.2 s. Step 2 ends amid it, at 4.5 s:
    its weights are proven by 6.4 s, and the fourth batch begins then."""
    slow = DecodeSpeed(0.2, 0.0, 2, continuous=False)
    work = Work(4, 2, 2, 1, tokens=TEN_TOKENS)
    modelled = simulate(work, Times(slow, train_s=0.5, prove_s=0.2))
    assert modelled.step_ends_s == pytest.approx((2.5, 4.5, 6.7, 8.9))
    assert modelled.ages == (0, 1, 1, 1)


def test_continuous_decoding_goes_on_while_weights_are_proven():
    work = Work(3, 2, 2, 1, tokens=TEN_TOKENS)
    modelled = simulate(work, Times(FLAT, train_s=0.5, prove_s=0.2))
    # batches of 1 s: two start at 0 s, trained by 1.5 and 2.0 s; the third starts on what is proven
    # at 1.7 s
    assert modelled.step_ends_s == pytest.approx((1.5, 2.0, 3.2))


def test_on_one_device_sampling_and_training_take_turns_at_any_lag():
    """1 s of sampling and 2 s of training: 3 s a batch however old samples may be."""
    work = Work(5, 8, 4, 2, tokens=TEN_TOKENS)
    modelled = simulate(work, Times(FLAT, train_s=2.0), lockstep=True, one_device=True)
    assert modelled.wall_s == pytest.approx(15.0)
    assert modelled.both_s == 0.0


def test_without_batches_only_the_end_of_a_play_is_waited_for():
    """Two turns of 1 s and tools of 0.5 s in lockstep: batch by batch the slowest of three calls
    holds all up; sequence by sequence each goes on with its own answer."""
    work = Work(1, 3, 1, 0, turns_mean=3.0, tokens=TEN_TOKENS, tool_concurrency=1)
    work = replace(work, tool_latency=LatencyMix(0.5, 0.0, 10.0))
    batched = DecodeSpeed(step_s=0.1, per_sequence_s=0.0, max_sequences=10, continuous=False)
    # 1, then three calls one after the other, twice, and a last turn
    assert simulate(work, Times(batched, 0.0), lockstep=True).wall_s == pytest.approx(6.0)
    # calls end at 1.5, 2.0, 2.5; turns at 2.5, 3.0, 3.5; calls at 3.0, 3.5, 4.0; turns at 5.0
    assert simulate(work, Times(FLAT, 0.0), lockstep=True).wall_s == pytest.approx(5.0)


def test_two_workers_sample_a_batch_in_half_the_time():
    slow = DecodeSpeed(0.0, 0.1, 64, continuous=False)  # 1 s for every sample
    work = Work(1, 8, 2, 0, tokens=TEN_TOKENS)
    assert simulate(work, Times(slow, 0.0), workers=1).wall_s == pytest.approx(8.0)
    assert simulate(work, Times(slow, 0.0), workers=2).wall_s == pytest.approx(4.0)


def test_slow_tools_pay_for_going_on_without_the_slowest():
    """With η = 4 the learner has other groups to train on while a slow tool is awaited."""
    work = Work(30, 32, 4, 4, turns_mean=2.0, tokens=TEN_TOKENS)
    work = replace(work, tool_latency=LatencyMix(0.3, 1.0, 10.0))
    times = Times(DecodeSpeed(0.02, 0.0002, 256, continuous=True), train_s=0.4)
    lag = simulate(work, times).samples_per_s(32, warm_up=5)
    sync = simulate(synchronous(work), times, lockstep=True).samples_per_s(32, warm_up=5)
    assert lag > 1.8 * sync


def test_filtered_groups_give_their_place_back():
    work = Work(10, 8, 4, 2, tokens=TEN_TOKENS, filter_share=0.5)
    modelled = simulate(work, Times(FLAT, train_s=1.0))
    assert modelled.filtered > 0
    assert len(modelled.step_ends_s) == 10


def test_when_everything_is_filtered_it_says_so_instead_of_going_round_for_ever(monkeypatch):
    monkeypatch.setattr(simulate_module, "MAX_EVENTS_PER_SAMPLE", 50)
    with pytest.raises(NoProgressError, match=r"no step in .* events"):
        simulate(Work(1, 4, 4, 0, filter_share=1.0, tokens=TEN_TOKENS), Times(FLAT, 1.0))


def test_publishing_too_rarely_stands_still():
    """The validator refuses N > η + 1; the model shows why: nothing may start on policy 0."""
    work = Work(5, 4, 4, 1, publish=every(3), tokens=TEN_TOKENS)
    with pytest.raises(DeadlockError, match=r"at step 2 of 5 the learner waits for 4 samples"):
        simulate(work, Times(FLAT, 1.0))
    enough = replace(work, publish=every(2))
    assert len(simulate(enough, Times(FLAT, 1.0)).step_ends_s) == 5


@pytest.mark.parametrize("limit", range(5))
@pytest.mark.parametrize("updates", range(1, 5))
@pytest.mark.parametrize("order", ["freshest", "fifo"])
def test_any_publish_interval_with_any_number_of_steps_a_batch(limit, updates, order):
    """N steps pass in ⌈N/u⌉ batches, and before the last of them the policy is u(⌈N/u⌉ − 1) behind:
    the loop goes on just where that is within η. N ≤ η + 1 always is. What the validator refuses
    besides is nothing new: a larger N that goes on publishes as often as N = η + 1 does."""
    for interval in range(1, limit + 1 + 2 * updates):
        batches = -(-interval // updates)
        most_behind = updates * (batches - 1)
        work = Work(
            12 * updates, 4, 2, limit, publish=every(interval), order=order,
            updates_per_batch=updates, tokens=TEN_TOKENS,
        )  # fmt: skip
        if most_behind > limit:
            assert interval > limit + 1
            with pytest.raises(DeadlockError):
                simulate(work, Times(FLAT, train_s=1.0))
            continue
        modelled = simulate(work, Times(FLAT, train_s=1.0, publish_s=1.0))
        assert len(modelled.step_ends_s) == 12 and max(modelled.ages) <= limit
        assert modelled.sync_s == pytest.approx(12 // batches)  # a publish takes one second
        assert -(-min(interval, limit + 1) // updates) == batches


def test_a_checkpoint_due_amid_a_batch_comes_at_its_end():
    """Every 3 steps, two a batch: of the ends 2, 4, 6, 8, 10, those at 4, 6 and 10 passed one."""
    work = Work(10, 4, 2, 0, updates_per_batch=2, tokens=TEN_TOKENS, checkpoint_every=3)
    modelled = simulate(work, Times(FLAT, train_s=1.0, checkpoint_s=10.0))
    # 1 s of sampling and 1 s of training a batch; the next is sampled while a checkpoint is written
    assert modelled.step_ends_s == pytest.approx((2.0, 14.0, 25.0, 26.0, 38.0))


@pytest.mark.parametrize(
    ("step_s", "per_sequence_s", "sequences"), [(-1.0, 1.0, 1), (0.0, 0.0, 1), (1.0, 0.0, 0)]
)
def test_speeds_that_cannot_be(step_s, per_sequence_s, sequences):
    with pytest.raises(ValueError, match="expected"):
        DecodeSpeed(step_s, per_sequence_s, sequences, continuous=True)


def test_thousands_of_steps_a_second():
    work = Work(500, 8, 4, 2, tokens=LengthMix(20.0, 0.5, 64))
    times = Times(DecodeSpeed(0.005, 0.0001, 256, continuous=False), train_s=0.3)
    simulate(work, times)
    started_s = time.process_time()
    modelled = simulate(work, times)
    assert isinstance(modelled, Modelled)
    assert 500 / (time.process_time() - started_s) > 1000
