"""What `rl-pipeline nightly …` and `reconcile` print."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.load import load_config
from configs.time_zones import time_zone
from configs.yaml_text import read_yaml_value
from flows.alerts.send import Alert, send_alert
from flows.commands.console import console
from flows.nightly.log import NightLine, NightLog
from flows.nightly.reconcile import Report
from flows.nightly.reconcile import reconcile as put_right
from flows.nightly.rules import missing_since
from flows.nightly.schedule import (
    NoServerError,
    cron_schedule,
    disable,
    enable,
    next_starts,
    prefect_server,
    read_schedule,
    run_now,
    server_url,
)

SHOWN_NIGHTS = 14
STYLE = {"trained": "green", "nothing new": "dim", "skipped": "yellow", "started": "cyan"}


def parameters_of(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Parameters of the flow for a profile and overrides, which are checked first.

    Raises:
        ConfigError: a key or value cannot be used.
    """
    load_config(config, overrides)
    mapped = dict(text.strip().removeprefix("--").partition("=")[::2] for text in overrides)
    return {
        "profile": config,
        **({"overrides": {k: read_yaml_value(v) for k, v in mapped.items()}} if mapped else {}),
    }


def enable_and_show(
    config: str, overrides: Sequence[str], cron: str | None, timezone: str | None, runs: Path
) -> None:
    """Switch the schedule on and show the next starts."""
    settings = load_config(config, overrides).nightly
    cron, timezone = cron or settings.cron, timezone or settings.timezone
    cron_schedule(cron, timezone)  # before a server is looked for
    with prefect_server(runs) as client:
        schedule = enable(client, cron, timezone, parameters_of(config, overrides))
    out = console()
    out.print(f"nights are [green]on[/]: {escape(cron)} in {escape(timezone)}, profile {config}")
    _show_starts(schedule.cron, schedule.timezone, out)


def _show_starts(cron: str, timezone: str, out: Console) -> None:
    for moment in next_starts(cron, timezone, datetime.now(UTC)):
        local = moment.astimezone(time_zone(timezone))
        out.print(f"  {local:%a %Y-%m-%d %H:%M %Z}  ({moment:%H:%M} UTC)")


def disable_and_show(runs: Path) -> None:
    """Switch the schedule off."""
    with prefect_server(runs) as client:
        were_on = disable(client)
    console().print("nights are off" if were_on else "nights were off already")


def start_and_show(config: str, overrides: Sequence[str], runs: Path) -> None:
    """Start one night."""
    parameters = parameters_of(config, overrides)
    with prefect_server(runs) as client:
        started = run_now(client, parameters)
    out = console()
    out.print(f"flow run {escape(started.name)} waits for the worker", soft_wrap=True)
    out.print(f"  watch it: prefect flow-run watch {started.id}", soft_wrap=True)


def show_status(config: str, runs: Path) -> None:
    """The schedule, where a server answers, and the last nights of the profile."""
    profile = load_config(config).profile
    out = console()
    try:
        with prefect_server(runs) as client:
            schedule = read_schedule(client)
    except NoServerError as error:
        out.print(f"[yellow]schedule unknown[/]: {escape(str(error))}", soft_wrap=True)
    else:
        if schedule is None or not schedule.active:
            out.print("nights are [yellow]off[/]; on with: rl-pipeline nightly enable")
        else:
            out.print(f"nights are [green]on[/]: {escape(schedule.cron)} in {schedule.timezone}")
            _show_starts(schedule.cron, schedule.timezone, out)
    lines = without_begun(NightLog(runs, profile).lines())
    if not lines:
        out.print(f"no night of profile {escape(profile)} yet")
        return
    out.print(nights_table(lines[-SHOWN_NIGHTS:], profile))


def without_begun(lines: Sequence[NightLine]) -> list[NightLine]:
    """The lines without those of nights that also say how they ended."""
    ended = {line.run_id for line in lines if line.outcome != "started"}
    return [line for line in lines if line.outcome != "started" or line.run_id not in ended]


def nights_table(lines: Sequence[NightLine], profile: str) -> Table:
    """Lines of the night log, oldest first."""
    table = Table(title=f"nights of {escape(profile)}", title_justify="left", box=None)
    for heading in ("night", "when", "", "new rows", "run", "why"):
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row(
            escape(line.day) + ("" if line.scheduled else " by hand"),
            f"{line.time:%Y-%m-%d %H:%M} UTC",
            f"[{STYLE.get(line.outcome, 'red')}]{line.outcome}[/]",
            "" if line.new_rows is None else str(line.new_rows),
            escape(line.run_id or ""),
            escape(line.reason),
        )
    return table


def look_for_missing(config: str, within_h: float, runs: Path) -> bool:
    """Whether a night ended well in time; people are told where none did."""
    loaded = load_config(config)
    last = NightLog(runs, loaded.profile).last_done()
    now, within = datetime.now(UTC), timedelta(hours=within_h)
    why = missing_since(last.time if last is not None else None, now, within)
    out = console()
    if why is None and last is not None:
        out.print(f"night {escape(last.day)}: {last.outcome}, {last.time:%Y-%m-%d %H:%M} UTC")
        return True
    body = f"{why}; `rl-pipeline nightly status -c {config}` shows how the last ones went"
    title = f"{loaded.profile}: a night is missing"
    alert = Alert("nightly_missing", title, body, f"nightly_missing:{loaded.profile}")
    outcome = send_alert(loaded.alerts, alert, runs)
    out.print(f"[bold red]missing[/] {escape(body)}", soft_wrap=True)
    for problem in outcome.problems:
        out.print(f"[yellow]![/] {escape(problem)}", soft_wrap=True)
    return False


def reconcile_and_show(runs: Path, *, resume: bool, every_s: float | None) -> None:
    """Put right what is not, once or again and again."""
    out = console()
    while True:
        report = _put_right(runs, out, resume=resume)
        if every_s is None or not report.empty:
            show_report(report, out)
        if every_s is None:
            return
        time.sleep(every_s)


def _put_right(runs: Path, out: Console, *, resume: bool) -> Report:
    """All of it; without a server that answers, what lies in files and in MLflow."""
    if server_url(runs) is None:
        return put_right(runs, None)
    try:
        with prefect_server(runs) as client:
            return put_right(runs, client, resume=resume)
    except NoServerError as error:
        out.print(f"[yellow]![/] {escape(str(error))}", soft_wrap=True)
        return put_right(runs, None)


def show_report(report: Report, out: Console) -> None:
    """One line for each thing that was put right."""
    for settled in report.settled:
        out.print(f"flow run {escape(settled.name)} is now {settled.state}: {escape(settled.why)}")
    for resumed in report.resumed:
        out.print(f"flow run {escape(resumed.name)} starts again: {escape(resumed.why)}")
    for night in report.nights:
        out.print(f"night {escape(night.day)} was killed (run {escape(night.run_id or '')})")
    if report.mlflow_closed:
        out.print(f"MLflow: {report.mlflow_closed} runs of dead processes closed")
    for unknown in report.unknown:
        out.print(f"[yellow]?[/] flow run {unknown}: nobody here knows its process; left as it is")
    if report.empty:
        out.print("nothing to put right")
