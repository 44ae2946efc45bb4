"""Advice against cases whose answer is known: who is the bottleneck, and when nothing is gained."""

from dataclasses import replace

import pytest

from configs.schema.rl import PublishSchedule
from tasks.rl.figures import Figures, Layout, Teaching
from tasks.rl.planner import Plan, plan, predict, train_s
from tasks.rl.simulated_engines import DecodeSpeed, LatencyMix, LengthMix
from tasks.rl.simulated_work import Times, Work

CLIP = (0.2, 0.28)
APART = Layout(1, 1)
EXACT = LengthMix(10.0, 0.0, 10)


def figures(generate_s: float, train: float, layout: Layout = APART, **work: object) -> Figures:
    """A batch of 16 takes one worker `generate_s`, and one rank `train` to train on."""
    speed = DecodeSpeed(0.0, generate_s / 160, 1000, continuous=True)
    settings = Work(10, 16, 4, 2, tokens=EXACT)
    return Figures(
        "by hand", (), layout, Times(speed, train), replace(settings, **work), Teaching(1.0)
    )


def test_with_equal_sides_on_two_devices_nothing_is_gained() -> None:
    """In turns, two devices halve both sides: 0.5 + 0.5/0.92 s; apart, 1 s and 1 s at once."""
    made = plan(figures(1.0, 1.0), CLIP)
    assert made.synchronous.layout == Layout(2, 2, shared=True)
    assert made.synchronous.samples_per_s == pytest.approx(16 / (0.5 + 0.5 / 0.92), rel=1e-3)
    assert made.asynchronous is not None
    assert made.asynchronous.samples_per_s == pytest.approx(16.0, rel=0.02)
    assert made.gain == pytest.approx(1.043, abs=0.02)
    assert made.stay_synchronous and made.best is made.synchronous


def test_slow_tools_make_it_worth_while() -> None:
    slow = figures(0.5, 1.0, turns_mean=2.0, tool_latency=LatencyMix(1.0, 1.0, 10.0))
    made = plan(slow, CLIP)
    assert made.gain > 1.3
    assert not made.stay_synchronous and made.best is made.asynchronous


def test_the_slower_side_gets_the_devices() -> None:
    """Sampling a batch takes eight times as long as training on it: 7 : 1 of eight devices."""
    made = plan(figures(8.0, 1.0), CLIP, devices=8)
    assert made.asynchronous is not None
    assert made.asynchronous.layout == Layout(7, 1)
    assert [c.layout.workers for c in made.splits] == [1, 2, 3, 4, 5, 6, 7]
    speeds = [c.samples_per_s for c in made.splits]
    assert speeds == sorted(speeds)
    assert speeds[0] == pytest.approx(16 / 8, rel=0.1)
    learner = plan(figures(1.0, 8.0), CLIP, devices=4)
    assert learner.asynchronous is not None and learner.asynchronous.layout == Layout(1, 3)


def test_one_device_cannot_be_split() -> None:
    made = plan(figures(1.0, 1.0, Layout(1, 1, shared=True)), CLIP)
    assert (made.devices, made.asynchronous, made.splits) == (1, None, ())
    assert made.gain == 1.0 and made.stay_synchronous


def test_no_larger_lag_is_advised_than_pays() -> None:
    """Without anything that waits, η = 1 keeps both sides busy."""
    made = plan(figures(1.0, 1.0), CLIP)
    assert made.asynchronous is not None and made.asynchronous.staleness_limit == 1
    assert made.asynchronous.publish == PublishSchedule(start=1, end=1, over_steps=1)


def test_age_that_teaches_less_counts_against_lag() -> None:
    drifting = replace(
        figures(1.0, 0.5, tool_latency=LatencyMix(1.0, 1.0, 10.0), turns_mean=2.0),
        teaching=Teaching(1.0, sequence_drift=1.0),
    )
    steady = replace(drifting, teaching=Teaching(1.0))
    assert plan(drifting, CLIP).gain < plan(steady, CLIP).gain


def test_ranks_scale_with_a_loss() -> None:
    assert train_s(8.0, APART, 1) == pytest.approx(8.0)
    assert train_s(8.0, APART, 2) == pytest.approx(8.0 / 1.84)
    assert train_s(8.0, APART, 4) == pytest.approx(8.0 / 1.84**2)
    assert train_s(8.0, Layout(1, 4), 2) == pytest.approx(8.0 * 1.84)


def test_sides_that_slow_each_other_gain_less_from_working_at_once() -> None:
    """1 s each beside each other, half of it alone: in turns a batch takes 1 s, as at once."""
    beside = figures(1.0, 1.0)
    alone = replace(beside, times_in_turns=figures(0.5, 0.5).times)
    turns = replace(beside.work, staleness_limit=0)
    assert predict("", beside, turns, APART, CLIP).samples_per_s == pytest.approx(8.0)
    assert predict("", alone, turns, APART, CLIP).samples_per_s == pytest.approx(16.0)
    lagged = [predict("", f, f.work, APART, CLIP).samples_per_s for f in (beside, alone)]
    assert lagged[0] == lagged[1] <= 16.0
    assert plan(alone, CLIP).stay_synchronous


def test_prices_by_hand() -> None:
    half = replace(figures(1.0, 1.0), teaching=Teaching(0.5))
    made: Plan = plan(half, CLIP)
    sync = made.synchronous
    speed = sync.samples_per_s
    assert sync.wall_s(1600) == pytest.approx(1600 / speed)
    assert sync.usd(1600, 3.6) == pytest.approx(1600 / speed * 2 * 0.001)
    assert sync.usd_per_effective(3.6) == pytest.approx(2 * 0.001 / (speed * 0.5))
    nothing = replace(half, teaching=Teaching(0.0))
    assert plan(nothing, CLIP).synchronous.usd_per_effective(3.6) == float("inf")


def test_progress_is_told_and_never_runs_over() -> None:
    told: list[tuple[str, int, int]] = []
    plan(figures(1.0, 1.0), CLIP, devices=3, report=lambda *said: told.append(said))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert all(done < of for _, done, of in told)
    assert {of for _, _, of in told} == {told[0][2]}


def test_rarer_publishing_ages_samples() -> None:
    work = replace(figures(1.0, 1.0).work, staleness_limit=4)
    often = predict("", figures(1.0, 1.0), work, Layout(1, 1), CLIP)
    rarely = replace(work, publish=PublishSchedule(start=4, end=4, over_steps=1))
    assert predict("", figures(1.0, 1.0), rarely, Layout(1, 1), CLIP).mean_age > often.mean_age
