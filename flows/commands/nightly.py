"""`rl-pipeline nightly …` and `rl-pipeline reconcile`: the nights, looked at and steered."""

from typing import Annotated

import typer

from flows.commands.console import FAILED, reports_errors
from flows.commands.options import DEFAULT_PROFILE, RUNS, Overrides, Profile, Runs

nightly = typer.Typer(
    no_args_is_help=True,
    help="The nightly retrain: when it starts, how nights went, whether one is missing.",
    epilog="Example: rl-pipeline nightly enable -c calculator --timezone Europe/Berlin",
)


@nightly.command(epilog="Example: rl-pipeline nightly status -c calculator")
@reports_errors
def status(config: Profile = DEFAULT_PROFILE, runs: Runs = RUNS) -> None:
    """Show the schedule, its next starts, and how the last nights went."""
    from flows.commands.nightly_view import show_status

    show_status(config, runs)


@nightly.command(
    epilog="Example: rl-pipeline nightly enable -c configs/calculator.yaml --cron '30 2 * * *' "
    "--timezone Europe/Berlin nightly.drop_folder=drop"
)
@reports_errors
def enable(
    overrides: Overrides = None,
    config: Profile = DEFAULT_PROFILE,
    cron: Annotated[
        str | None, typer.Option("--cron", help="When; default: nightly.cron of the profile.")
    ] = None,
    timezone: Annotated[
        str | None, typer.Option("--timezone", help="Zone; default: nightly.timezone.")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Have nights start by schedule on the server's worker; shows the next three starts."""
    from flows.commands.nightly_view import enable_and_show

    enable_and_show(config, overrides or [], cron, timezone, runs)


@nightly.command(epilog="Example: rl-pipeline nightly disable")
@reports_errors
def disable(runs: Runs = RUNS) -> None:
    """Have no nights start; one that runs goes on."""
    from flows.commands.nightly_view import disable_and_show

    disable_and_show(runs)


@nightly.command(name="run-now", epilog="Example: rl-pipeline nightly run-now -c calculator")
@reports_errors
def run_now(
    overrides: Overrides = None, config: Profile = DEFAULT_PROFILE, runs: Runs = RUNS
) -> None:
    """Start a night on the worker now. It does not count as the night of its day."""
    from flows.commands.nightly_view import start_and_show

    start_and_show(config, overrides or [], runs)


@nightly.command(epilog="Example: rl-pipeline nightly missing --within 26")
@reports_errors
def missing(
    config: Profile = DEFAULT_PROFILE,
    within: Annotated[
        float, typer.Option("--within", min=0.0, help="Hours since a night last ended well.")
    ] = 26.0,
    runs: Runs = RUNS,
) -> None:
    """Alert, and exit with 1, where no night ended well in time; for a timer of its own."""
    from flows.commands.nightly_view import look_for_missing

    if not look_for_missing(config, within, runs):
        raise typer.Exit(FAILED)


@reports_errors
def reconcile(
    resume: Annotated[
        bool, typer.Option("--resume", help="Start nights that crashed again, twice at most.")
    ] = False,
    every: Annotated[
        float | None, typer.Option("--every", min=1.0, help="Go on, every so many seconds.")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Close what killed processes left open in Prefect, MLflow and the night log.

    Every run on a worker does this at its start; between runs, this does. An owner that lives, or
    that another machine knows of, is left alone.
    """
    from flows.commands.nightly_view import reconcile_and_show

    reconcile_and_show(runs, resume=resume, every_s=every)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(nightly, name="nightly")
    app.command(epilog="Example: rl-pipeline reconcile --resume --every 60")(reconcile)
