"""Controllers step by step, and the same steps across a save and load."""

import json
import math

import pytest

from configs.schema.rl import AdaptiveKl, Anneal, PublishSchedule
from configs.schema.rl_losses import WeightAlarmConfig
from tasks.rl.controllers import (
    AdaptiveKlController,
    PublishInterval,
    Remedy,
    WeightAlarm,
    linear_anneal,
)

STEADY = AdaptiveKl(target_start=0.1, target_end=0.1, band=0.5, horizon=10, over_steps=100)


def alarm_of(**settings) -> WeightAlarm:
    return WeightAlarm(WeightAlarmConfig(**settings))


def reloaded(controller, fresh):
    """`fresh` with the state of `controller`, taken through JSON."""
    fresh.load_state(json.loads(json.dumps(controller.state_dict())))
    return fresh


@pytest.mark.parametrize(
    ("step", "value"),
    [(-3, 1.2), (0, 1.2), (1, 1.16), (5, 1.0), (10, 0.8), (11, 0.8), (10**9, 0.8)],
)
def test_linear_anneal_by_hand(step, value):
    assert linear_anneal(Anneal(start=1.2, end=0.8, over_steps=10), step) == pytest.approx(value)


def test_linear_anneal_ends_exactly():
    # 0.2 + (0.9 − 0.2)·1 is 0.8999999999999999 in floating point.
    assert linear_anneal(Anneal(start=0.2, end=0.9, over_steps=7), 7) == 0.9


def test_publish_every_step_by_default():
    publish = PublishInterval(PublishSchedule())
    published = []
    for step in range(4):
        if publish.due(step):
            publish.published(step)
            published.append(step)
    assert published == [1, 2, 3]


def test_publish_interval_loosens():
    # N goes 1 → 3 over 4 steps: at steps 0…4 it is 1, 1.5, 2, 2.5, 3, rounded half to even
    # 1, 2, 2, 2, 3. Publish at 2 (2 ≥ 2), at 5 (3 ≥ 3), at 8.
    publish = PublishInterval(PublishSchedule(start=1, end=3, over_steps=4))
    assert [publish.interval(s) for s in range(6)] == [1, 2, 2, 2, 3, 3]
    published = []
    for step in range(10):
        if publish.due(step):
            publish.published(step)
            published.append(step)
        assert publish.lag(step) < 3
    assert published == [2, 5, 8]


@pytest.mark.parametrize(
    ("every", "updates", "published"),
    [
        (3, 2, [4, 8, 12]),  # due at 3, and the batch ends at 4; from 4 on at 7, so at 8
        (4, 2, [4, 8, 12]),
        (5, 2, [6, 12]),
        (1, 3, [3, 6, 9, 12]),
        (4, 3, [6, 12]),
    ],
)
def test_a_publish_due_amid_a_batch_comes_at_its_end(every, updates, published):
    publish, found = PublishInterval(PublishSchedule(start=every, end=every)), []
    for step in range(updates, 13, updates):
        if publish.due(step):
            publish.published(step)
            found.append(step)
        assert publish.lag(step) < every
    assert found == published


def test_publish_interval_survives_a_resume():
    schedule = PublishSchedule(start=3, end=3)
    publish = PublishInterval(schedule)
    publish.published(6)
    again = reloaded(publish, PublishInterval(schedule))
    assert [again.due(s) for s in (7, 8, 9)] == [False, False, True]


@pytest.mark.parametrize("kl", [0.05, 0.1, 0.15])
def test_kl_inside_the_band_moves_nothing(kl):
    assert AdaptiveKlController(STEADY, 0.01).update(kl, 0) == 0.01


@pytest.mark.parametrize(
    ("kl", "n", "coefficient"),
    [
        (0.2, 1, 0.0102),  # error +1 clipped to .2: × (1 + .2/10)
        (100.0, 1, 0.0102),
        (0.01, 1, 0.0098),  # error −.9 clipped to −.2
        (0.0, 1, 0.0098),
        (-0.3, 1, 0.0098),  # k1 may be negative
        (0.2, 5, 0.011),  # five steps at once: × (1 + .2·5/10)
    ],
)
def test_kl_outside_the_band_moves_beta(kl, n, coefficient):
    assert AdaptiveKlController(STEADY, 0.01).update(kl, 0, n) == pytest.approx(coefficient)


def test_kl_error_below_the_clip_counts_as_it_is():
    # Band of 5 %: KL .11 is 10 % above: × (1 + .1/10)
    config = AdaptiveKl(target_start=0.1, target_end=0.1, band=0.05, horizon=10)
    assert AdaptiveKlController(config, 0.01).update(0.11, 0) == pytest.approx(0.0101)


def test_kl_band_narrows_with_its_target():
    config = AdaptiveKl(target_start=0.2, target_end=0.1, band=0.5, over_steps=10, horizon=10)
    controller = AdaptiveKlController(config, 0.01)
    assert controller.band(0) == pytest.approx((0.1, 0.3))
    assert controller.band(5) == pytest.approx((0.075, 0.225))
    assert controller.band(10) == pytest.approx((0.05, 0.15))
    assert controller.update(0.25, 0) == 0.01
    assert controller.update(0.25, 10) == pytest.approx(0.0102)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_kl_that_is_not_a_number_moves_nothing_and_is_counted(kl):
    controller = AdaptiveKlController(STEADY, 0.01)
    assert controller.update(kl, 0) == 0.01
    assert controller.unknown == 1
    assert controller.update(0.2, 1) == pytest.approx(0.0102)


def test_kl_coefficient_stays_within_its_bounds():
    config = STEADY.model_copy(update={"min_coefficient": 0.009, "max_coefficient": 0.011})
    controller = AdaptiveKlController(config, 0.01)
    assert [controller.update(9.0, s) for s in range(9)][-1] == 0.011
    assert [controller.update(0.0, s) for s in range(99)][-1] == 0.009
    assert AdaptiveKlController(config, 0.0).coefficient == 0.009
    assert AdaptiveKlController(config, 5.0).coefficient == 0.011


def test_kl_controller_survives_a_resume_to_the_bit():
    controller = AdaptiveKlController(STEADY, 0.01)
    controller.update(0.2, 0)
    controller.update(math.nan, 1)
    again = reloaded(controller, AdaptiveKlController(STEADY, 0.5))
    assert again.unknown == 1
    assert again.update(0.7, 2) == controller.update(0.7, 2)


def test_weight_alarm_gives_the_remedies_in_order_with_a_cooldown():
    alarm = alarm_of(threshold=10, cooldown_steps=2)
    weights = [10.0, 10.1, 50.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]
    advice = [alarm.observe(step, weight) for step, weight in enumerate(weights)]
    # 10.0 does not pass 10. Alarms at 1, 3, 5, 7: two steps apart.
    assert [a.step for a in advice if a] == [1, 3, 5, 7]
    assert [a.remedy for a in advice if a] == [
        Remedy.PUBLISH_MORE_OFTEN,
        Remedy.SMALLER_BUFFER,
        Remedy.TIGHTER_CLIP,
        Remedy.TIGHTER_CLIP,
    ]
    assert advice[1].largest_weight == 10.1
    # Only said: nothing has changed.
    assert not any(a.applied for a in advice if a)
    assert (alarm.publish_divisor, alarm.admission_limit(4, 0), alarm.tightness) == (1, 4, 1.0)


def test_weight_alarm_starts_anew_after_two_quiet_cooldowns():
    alarm = alarm_of(cooldown_steps=5)
    assert alarm.observe(0, 20.0).remedy is Remedy.PUBLISH_MORE_OFTEN
    assert alarm.observe(10, 20.0).remedy is Remedy.SMALLER_BUFFER
    assert alarm.observe(21, 20.0).remedy is Remedy.PUBLISH_MORE_OFTEN


@pytest.mark.parametrize("weight", [math.nan, 0.0, 1.0, 10.0])
def test_weight_alarm_is_silent_at_or_below_the_threshold(weight):
    assert alarm_of().observe(0, weight) is None


def test_weight_alarm_survives_a_resume():
    alarm = alarm_of(cooldown_steps=3)
    alarm.observe(0, math.inf)
    again = reloaded(alarm, alarm_of(cooldown_steps=3))
    assert again.observe(2, 99.0) is None
    assert again.observe(3, 99.0).remedy is Remedy.SMALLER_BUFFER


def test_weight_alarm_that_acts_applies_each_remedy_within_its_budget():
    alarm = alarm_of(cooldown_steps=1, act=True, budget=2)
    seen = []
    for step in range(6):
        advice = alarm.observe(step, 99.0)
        settings = (alarm.publish_divisor, alarm.admission_limit(4, 0), alarm.tightness)
        seen.append((advice.applied, *settings))
    assert seen == [
        (True, 2, 4, 1.0),
        (True, 2, 3, 1.0),
        (True, 2, 3, 0.5),
        (True, 2, 3, 0.25),
        (False, 2, 3, 0.25),  # the last remedy's budget is used up: from here on only said
        (False, 2, 3, 0.25),
    ]
    again = reloaded(alarm, alarm_of(cooldown_steps=1, act=True, budget=2))
    assert (again.publish_divisor, again.admission_limit(4, 0), again.tightness) == (2, 3, 0.25)
    # A new spell, after more than two quiet cooldowns, starts with the first remedy once more.
    assert again.observe(9, 99.0).remedy is Remedy.PUBLISH_MORE_OFTEN
    assert again.publish_divisor == 4


def test_a_smaller_buffer_never_starves_the_run():
    # η 2, cut by 2: admission sees 0; with a policy published 2 steps ago it must still see 2, or
    # ⌊(0 − 2)/1⌋ + 1 < 1 batches could be admitted and nobody would ever publish again. A policy
    # older than η admits nothing, as without the alarm.
    alarm = alarm_of(cooldown_steps=1, act=True, budget=2)
    for step in (0, 1, 5, 6):  # two spells: each ends with the second remedy
        alarm.observe(step, 99.0)
    assert [alarm.admission_limit(2, lag) for lag in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert alarm.admission_limit(0, 0) == 0


def test_publish_interval_is_divided_by_a_remedy_and_never_below_one():
    publish = PublishInterval(PublishSchedule(start=3, end=3))
    publish.published(4)
    assert [publish.due(5, divisor) for divisor in (1, 2, 4)] == [False, True, True]
    assert not publish.due(4, 4)
