"""`rl-pipeline gc`: free disk space without losing what is needed."""

from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from flows.commands.console import console, reports_errors
from flows.commands.options import RUNS, Runs

SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Examples: rl-pipeline gc  ·  rl-pipeline gc --keep-runs 3 --yes")(gc)


@reports_errors
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Really take it away.")] = False,
    keep_runs: Annotated[
        int | None, typer.Option(min=1, help="Newest runs to keep, instead of the profile's.")
    ] = None,
    config: Annotated[
        str, typer.Option("--config", "-c", help="Profile whose `retention` counts.")
    ] = "calculator",
    runs: Runs = RUNS,
) -> None:
    """Show what nothing needs any more; with --yes, take it away.

    What champion, previous, every device and the newest runs were made from stays, back to the
    prompts. MLflow's history and the promotion ledger are never touched.
    """
    from configs.load import load_config
    from flows.retention import collect_garbage, plan_retention

    overrides = [] if keep_runs is None else [f"retention.keep_runs={keep_runs}"]
    retention = load_config(config, overrides).retention
    done = collect_garbage(runs, retention) if yes else plan_retention(runs, retention)
    out = console()
    for why in done.kept:
        out.print(f"[green]keeps[/] {escape(why)}, and all it was made from", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("size", "folder", "why"):
        table.add_column(heading, overflow="fold")
    for doomed in done.doomed[:SHOWN]:
        table.add_row(decimal(doomed.bytes), escape(str(doomed.path)), escape(doomed.why))
    if done.doomed:
        out.print(table)
    if len(done.doomed) > SHOWN:
        out.print(f"and {len(done.doomed) - SHOWN} more")
    total = f"{len(done.doomed)} folders, {decimal(done.bytes)}"
    if yes:
        out.print(f"[green]freed[/] {total}")
    elif done.doomed:
        out.print(f"nothing was taken away; `rl-pipeline gc --yes` frees {total}")
    else:
        out.print("nothing to take away")
