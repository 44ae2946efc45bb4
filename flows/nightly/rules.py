"""The rules of a night: which day it belongs to, whether it starts, whether it trains.

Pure: times and facts come in, verdicts go out. `flows.nightly.run` finds the facts.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from configs.time_zones import time_zone

Clock = tuple[int, int]
"""Hour and minute on the wall."""


@dataclass(frozen=True)
class Night:
    """The night a run is asked to be."""

    day: str
    """The date the schedule meant, in the schedule's zone: there is one night a day. Of a schedule
    that is not daily, the time it named."""
    zone: str
    scheduled_at: datetime
    """UTC."""
    scheduled: bool = False
    """The schedule started it, not a person."""
    attempt: int = 1
    """From 1; more where Prefect runs the same night again after it failed."""
    newer_at: datetime | None = None
    """When the schedule's newest later night was due, where one is due already."""
    flow_run_id: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a night starts, or trains; `why` says why not."""

    goes_on: bool
    why: str = ""
    alert: bool = False
    """Whether people are told: the night is lost, and no other does its work."""


def night_day(scheduled_at: datetime, zone: str, clock: Clock) -> str:
    """The local date that a daily schedule meant by this instant; `clock` is its hour and minute.

    On the day clocks change, the time a schedule names may not exist; it then runs up to an hour
    off, which near midnight falls on another date. So the date is that of the nearest `clock`.
    """
    local = scheduled_at.astimezone(time_zone(zone)).replace(tzinfo=None)
    meant = (
        datetime(day.year, day.month, day.day, *clock)
        for day in (local.date() + timedelta(days=offset) for offset in (-1, 0, 1))
    )
    return min(meant, key=lambda moment: abs(moment - local)).date().isoformat()


def night_slot(scheduled_at: datetime, zone: str, cron: str | None) -> str:
    """What there is one night of: the day of a daily schedule, the named time of any other."""
    clock = daily_clock(cron) if cron is not None else None
    if clock is None:
        return f"{scheduled_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return night_day(scheduled_at, zone, clock)


def daily_clock(cron: str) -> Clock | None:
    """Hour and minute of a cron that names one of each; None for any other."""
    fields = cron.split()
    if len(fields) != 5 or not (fields[0].isdigit() and fields[1].isdigit()):
        return None
    return int(fields[1]), int(fields[0])


def may_start(
    night: Night, now: datetime, *, max_start_delay_s: float, done: str | None
) -> Verdict:
    """Whether a night starts.

    A night a person asked for always does. A scheduled one does not where its day has been dealt
    with (`done` says how), or, at its first attempt, where it is too late or a newer one is due: it
    waited behind another run, and the newest of those that wait does the work of all.
    """
    if not night.scheduled:
        return Verdict(True)
    if done is not None:
        return Verdict(False, f"the night of {night.day} is already done: {done}")
    if night.attempt > 1:
        return Verdict(True)
    if night.newer_at is not None:
        due = f"{night.newer_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return Verdict(False, f"a newer night is due (since {due}) and does its work too")
    late_s = (now - night.scheduled_at).total_seconds()
    if late_s > max_start_delay_s:
        return Verdict(
            False,
            f"{_hours(late_s)} late, more than nightly.max_start_delay_s={max_start_delay_s:g}",
            alert=True,
        )
    return Verdict(True)


def _hours(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def enough_new(new_rows: int, usable: int, min_new_rows: int) -> Verdict:
    """Whether there is enough to train on; `usable` new rows are in bands RL draws from."""
    if usable >= min_new_rows:
        return Verdict(True)
    unusable = new_rows - usable
    other = f" ({unusable} more are in bands that data.rl_bands leaves out)" if unusable else ""
    return Verdict(
        False,
        f"nothing new: {usable} training rows that the last night did not have{other}, "
        f"nightly.min_new_rows={min_new_rows}",
    )


def missing_since(last_done: datetime | None, now: datetime, within: timedelta) -> str | None:
    """Why a night is missing; None where one was over within that time."""
    if last_done is None:
        return "no night has ever ended well"
    if now - last_done <= within:
        return None
    gone = _hours((now - last_done).total_seconds())
    return (
        f"the last night that ended well is {gone} ago, more than {_hours(within.total_seconds())}"
    )
