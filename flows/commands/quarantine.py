"""`rl-pipeline quarantine list | show | release`."""

from typing import Annotated

import typer

from flows.commands.console import reports_errors
from flows.commands.options import RUNS, Runs

commands = typer.Typer(
    no_args_is_help=True,
    help="Rows that data prep set aside, with the reason; let one back in, on your word.\n\n"
    "A released row passes the one check it was released from, in the next data prep; every other "
    "check still binds, and a row of the held-out set never comes back.",
    epilog="Example: rl-pipeline quarantine list, then rl-pipeline quarantine show HANDLE",
)
Row = Annotated[str, typer.Argument(metavar="ROW", help="Handle from `list`, or the row's id.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(commands, name="quarantine")


@commands.command("list", epilog="Example: rl-pipeline quarantine list --check duplicate_prompt")
@reports_errors
def list_rows(
    check: Annotated[
        str | None, typer.Option("--check", help="Only rows this check set aside.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Only rows of this run, such as `latest`.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="How many rows at most.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Rows set aside in any run, newest data prep first, counted by check."""
    from flows.commands.quarantine_view import show_rows

    show_rows(runs, check, run, last, as_json)


@commands.command("show", epilog="Example: rl-pipeline quarantine show 3f9a2c41d0")
@reports_errors
def show(row: Row, runs: Runs = RUNS) -> None:
    """One row whole: reason, file and line, content, runs it was in, decisions on it."""
    from flows.commands.quarantine_view import show_row

    show_row(runs, row)


@commands.command(
    "release", epilog="Example: rl-pipeline quarantine release 3f9a2c41d0 --reason 'meant so'"
)
@reports_errors
def release(
    row: Row,
    reason: Annotated[str, typer.Option("--reason", help="Why, in your words; it is kept.")],
    actor: Annotated[
        str | None, typer.Option("--actor", help="Who decides; default: user@host.")
    ] = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Take a release back instead.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Let a row pass the check that set it aside; signed, and honoured by the next data prep."""
    from flows.commands.quarantine_view import release_row

    release_row(runs, row, reason, actor, withdraw=withdraw)
