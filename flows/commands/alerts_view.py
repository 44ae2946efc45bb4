"""What `rl-pipeline alerts` prints."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from configs.schema.operations import AlertsConfig
from flows.alerts.send import LOG_NAME, AlertOutcome, read_alerts
from flows.commands.console import console
from tasks.artifacts.atomic import dump_json

_COLOURS = {"sent": "green", "partly": "yellow", "failed": "bold red", "sending": "yellow"}


def show_outcome(outcome: AlertOutcome, config: AlertsConfig) -> bool:
    """Print who took an alert; False where not all did, or nobody is to be told."""
    out = console()
    if outcome.status == "nobody":
        out.print(
            f"[yellow]nobody is told[/]: {escape(' and '.join(config.urls_env))} "
            f"{'are' if len(config.urls_env) > 1 else 'is'} empty. Put Apprise addresses in, "
            "separated by spaces"
        )
    for receiver in outcome.receivers:
        mark = "[green]taken by[/]" if receiver.ok else "[bold red]not taken by[/]"
        why = f": {escape(receiver.why)}" if receiver.why else ""
        out.print(f"{mark} {escape(receiver.name)}{why}")
    if outcome.note:
        out.print(f"[yellow]{escape(outcome.note)}[/]")
    return outcome.status == "sent"


def show_alerts(runs: Path, last: int, as_json: bool) -> None:
    """Print the newest alerts, oldest of them first."""
    found, unreadable = read_alerts(runs)
    if as_json:
        for entry in found[-last:]:
            sys.stdout.write(dump_json(asdict(entry)) + "\n")
    elif not found:
        console().print(f"no alerts in {escape(str(runs / LOG_NAME))}")
    else:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("when (UTC)", "event", "what", "outcome"):
            table.add_column(heading, overflow="fold")
        for entry in found[-last:]:
            when = datetime.fromtimestamp(entry.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
            failed = [
                f"{r.get('name')}: {r.get('why')}" for r in entry.receivers if not r.get("ok")
            ]
            colour = _COLOURS.get(entry.status, "dim")
            outcome = f"[{colour}]{escape(entry.status)}[/]"
            table.add_row(
                when,
                escape(entry.event),
                escape(entry.title),
                "\n".join([outcome, *map(escape, failed)]),
            )
        console().print(table)
    if unreadable:
        lines = ", ".join(map(str, unreadable[:5]))
        console(stderr=True).print(
            f"[yellow]{escape(str(runs / LOG_NAME))}: line {lines} cannot be read (cut off by a "
            "kill?)[/]"
        )
