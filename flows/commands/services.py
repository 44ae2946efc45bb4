"""`rl-pipeline up | down | ps | backup`: the services of real use."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.console import FAILED, console, reports_errors
from flows.commands.options import RUNS, Runs

PREFECT_PORT_VARIABLE, MLFLOW_PORT_VARIABLE = "RL_PIPELINE_PREFECT_PORT", "RL_PIPELINE_MLFLOW_PORT"
STATE_STYLE = {"running": "green", "stopped": "dim", "crashed": "red", "not answering": "yellow"}


def _tell(name: str, what: str) -> None:
    console().print(f"[bold]{name:<10}[/] {escape(what)}", soft_wrap=True)


@reports_errors
def up(
    prefect_port: Annotated[
        int,
        typer.Option(min=1, max=65535, envvar=PREFECT_PORT_VARIABLE, help="Port of Prefect."),
    ] = 4200,
    mlflow_port: Annotated[
        int,
        typer.Option(min=1, max=65535, envvar=MLFLOW_PORT_VARIABLE, help="Port of MLflow."),
    ] = 5000,
    runs: Runs = RUNS,
) -> None:
    """Start Prefect server, MLflow and a worker on 127.0.0.1, and deploy the pipeline.

    Twice is the same as once; after a crash it repairs. Databases are SQLite files in the runs
    folder, or PostgreSQL by RL_PIPELINE_PREFECT_DATABASE_URL and RL_PIPELINE_MLFLOW_DATABASE_URL.
    """
    from flows.services import control as services
    from flows.services.specs import Ports

    ports = Ports(prefect=prefect_port, mlflow=mlflow_port)
    found = services.up(runs, ports, Path.cwd(), _tell)
    ui = found["PREFECT_API_URL"].removesuffix("/api")
    out = console()
    out.print(f"\nPrefect {ui}   MLflow {found['MLFLOW_TRACKING_URI']}", soft_wrap=True)
    out.print("Next: prefect deployment run rl-pipeline --watch", soft_wrap=True)


@reports_errors
def down(runs: Runs = RUNS) -> None:
    """Stop the services and every process they started.

    A run in progress is ended; the next one goes on from its last checkpoint.
    """
    from flows.services import control as services

    services.down(runs, _tell)


@reports_errors
def ps(runs: Runs = RUNS) -> None:
    """Show the services: state, address, process, memory, log. Exit code 1 unless all run."""
    from flows.services import control as services

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("service", "state", "address", "pid", "up for", "processes", "memory", "log"):
        table.add_column(heading, overflow="fold")
    found = services.statuses(runs)
    for line in found:
        alive = line.pid is not None and line.started is not None
        table.add_row(
            line.name,
            f"[{STATE_STYLE[line.state]}]{line.state}[/]",
            line.url,
            str(line.pid) if alive else "–",
            _span(time.time() - (line.started or 0.0)) if alive else "–",
            str(line.processes) if alive else "–",
            f"{line.memory_bytes / 2**20:.0f} MiB" if alive else "–",
            escape(os.path.relpath(line.log)),
        )
    console().print(table)
    if any(line.state != "running" for line in found):
        raise typer.Exit(FAILED)


@reports_errors
def backup(runs: Runs = RUNS) -> None:
    """Copy the databases of Prefect and MLflow, while they run, into runs/backups."""
    from flows.services.backup import backup_databases

    folder = backup_databases(runs)
    console().print(f"{folder}" if folder else "no database yet", soft_wrap=True)


def _span(seconds: float) -> str:
    """A length of time in its two largest units."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    example = "Example: rl-pipeline up, then prefect deployment run rl-pipeline --watch"
    app.command(epilog=example)(up)
    app.command(epilog="Example: rl-pipeline down")(down)
    app.command(epilog="Example: rl-pipeline ps")(ps)
    app.command(epilog="Example: rl-pipeline backup; rl-pipeline gc removes old ones")(backup)
