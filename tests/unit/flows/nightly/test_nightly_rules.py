"""The rules of a night, on both days clocks change and every way of being late."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from prefect.server.schemas.schedules import CronSchedule

from flows.nightly.rules import (
    Night,
    daily_clock,
    enough_new,
    may_start,
    missing_since,
    night_day,
    night_slot,
)

DAY = timedelta(days=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def scheduled(cron: str, zone: str, first: str, days: int) -> list[datetime]:
    """Every start Prefect's scheduler plans in so many days."""
    schedule = CronSchedule(cron=cron, timezone=zone)
    start = utc(first)
    found = asyncio.run(schedule.get_dates(start=start, end=start + days * DAY))
    return [datetime.fromtimestamp(moment.timestamp(), UTC) for moment in found]


@pytest.mark.parametrize(
    ("first", "change", "at"),
    [
        # 02:30 does not exist on 2027-03-28: it runs at 00:30 UTC, which the clocks call 01:30
        ("2027-03-26T12:00", "2027-03-28", "2027-03-28T00:30"),
        # 02:30 is there twice on 2026-10-25: the first one, 00:30 UTC
        ("2026-10-23T12:00", "2026-10-25", "2026-10-25T00:30"),
    ],
)
def test_half_past_two_in_berlin_runs_once_on_the_days_clocks_change(first, change, at):
    starts = scheduled("30 2 * * *", "Europe/Berlin", first, 4)
    days = [night_day(moment, "Europe/Berlin", (2, 30)) for moment in starts]
    assert len(days) == 4 == len(set(days))
    assert days.count(change) == 1
    assert starts[days.index(change)] == utc(at)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Africa/Cairo", "Asia/Beirut", "UTC"])
@pytest.mark.parametrize("cron", ["0 0 * * *", "30 2 * * *", "59 23 * * *", "0 1 * * *"])
def test_a_year_of_nights_is_one_a_day(zone, cron):
    """Where clocks change at midnight, a night moves to another date; its day stays its own."""
    starts = scheduled(cron, zone, "2027-01-01T12:00", 365)
    days = [night_slot(moment, zone, cron) for moment in starts]
    assert len(days) == 365
    assert len(set(days)) == 365


def test_a_midnight_that_does_not_exist_keeps_its_own_day():
    # Cairo, 2027-04-30: clocks go from 00:00 to 01:00; Prefect starts at 22:00 UTC all the same
    (moment,) = scheduled("0 0 * * *", "Africa/Cairo", "2027-04-29T12:00", 1)
    assert night_day(moment, "Africa/Cairo", (0, 0)) == "2027-04-30"
    assert night_day(moment - timedelta(hours=1), "Africa/Cairo", (0, 0)) == "2027-04-30"


def test_a_schedule_that_is_not_daily_has_a_slot_for_each_time():
    assert night_slot(utc("2027-01-01T10:05"), "UTC", "*/5 * * * *") == "2027-01-01T10:05:00Z"
    assert night_slot(utc("2027-01-01T10:05"), "Europe/Berlin", None) == "2027-01-01T10:05:00Z"


@pytest.mark.parametrize(
    ("cron", "clock"),
    [
        ("30 2 * * *", (2, 30)),
        ("0 0 * * 0", (0, 0)),
        ("*/5 * * * *", None),
        ("0 1,3 * * *", None),
        ("@daily", None),
        ("", None),
    ],
)
def test_daily_clock_reads_crons_of_one_time(cron, clock):
    assert daily_clock(cron) == clock


AT = utc("2027-01-05T01:30")


def night(**changed) -> Night:
    values = {"day": "2027-01-05", "zone": "UTC", "scheduled_at": AT, "scheduled": True, **changed}
    return Night(**values)


def judged(night: Night, late: timedelta = timedelta(), done: str | None = None):
    return may_start(night, AT + late, max_start_delay_s=6 * 3600.0, done=done)


def test_a_night_in_time_starts_and_one_second_past_the_limit_does_not():
    assert judged(night()).goes_on
    assert judged(night(), timedelta(hours=6)).goes_on
    verdict = judged(night(), timedelta(hours=6, seconds=1))
    assert not verdict.goes_on and verdict.alert
    assert verdict.why == "6 h 0 min late, more than nightly.max_start_delay_s=21600"


def test_a_night_behind_a_newer_one_leaves_the_work_to_it_without_an_alarm():
    verdict = judged(night(newer_at=AT + DAY), DAY + timedelta(minutes=1))
    assert not verdict.goes_on and not verdict.alert
    assert verdict.why == "a newer night is due (since 2027-01-06 01:30 UTC) and does its work too"


def test_a_second_night_of_a_day_does_not_start_whatever_else_holds():
    verdict = judged(night(attempt=2), done="trained")
    assert not verdict.goes_on
    assert verdict.why == "the night of 2027-01-05 is already done: trained"


def test_a_night_that_failed_may_be_tried_again_hours_later():
    assert judged(night(attempt=2, newer_at=AT + DAY), timedelta(hours=9)).goes_on


def test_a_person_may_start_a_night_at_any_time():
    assert judged(night(scheduled=False), timedelta(days=3), done="trained").goes_on


def test_too_few_new_rows_do_not_train():
    assert enough_new(1, 1, 1).goes_on
    assert enough_new(9, 9, 9).goes_on
    assert not enough_new(8, 8, 9).goes_on
    assert enough_new(0, 0, 1).why == (
        "nothing new: 0 training rows that the last night did not have, nightly.min_new_rows=1"
    )
    verdict = enough_new(12, 0, 1)
    assert (
        not verdict.goes_on
        and "(12 more are in bands that data.rl_bands leaves out)" in verdict.why
    )


def test_a_night_is_missing_after_the_time_and_not_at_it():
    within = timedelta(hours=26)
    assert missing_since(AT, AT + within, within) is None
    why = missing_since(AT, AT + within + timedelta(minutes=1), within)
    assert why == "the last night that ended well is 26 h 1 min ago, more than 26 h 0 min"
    assert missing_since(None, AT, within) == "no night has ever ended well"
