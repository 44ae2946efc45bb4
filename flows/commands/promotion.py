"""`rl-pipeline promote | rollback | approve | history`."""

from typing import Annotated

import typer

from flows.commands.console import reports_errors
from flows.commands.options import RUNS, Runs

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Profile, where several have releases.", show_default=False),
]
Reason = Annotated[
    str | None, typer.Option("--reason", help="Goes to the ledger.", show_default=False)
]
Which = Annotated[
    str,
    typer.Argument(help="A run (id, folder, latest), a version (v3, calculator:3), or a hash."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog="Example: rl-pipeline promote calculator:3 --reason 'reads better to the users'"
    )(promote)
    app.command(
        epilog="Example: rl-pipeline rollback --model calculator --reason 'wrong units on device 2'"
    )(rollback)
    app.command(
        epilog="Example: rl-pipeline approve runs/latest, or rl-pipeline approve v4 --reject "
        "--reason 'it leaves the units out'"
    )(approve)
    app.command(epilog="Example: rl-pipeline history --model calculator --json")(history)


@reports_errors
def promote(
    which: Which,
    force: Annotated[
        bool, typer.Option("--force", help="Although a gate or the champion speaks against it.")
    ] = False,
    reason: Reason = None,
    model: Model = None,
    runs: Runs = RUNS,
) -> None:
    """Make a release the champion; its bundle is verified first."""
    from flows.commands.promotion_view import announce
    from flows.promotion import acts as promotion_acts

    announce(promotion_acts.promote(runs, which, force=force, reason=reason, model=model))


@reports_errors
def rollback(reason: Reason = None, model: Model = None, runs: Runs = RUNS) -> None:
    """Return to the previous champion. What is rolled back comes again by hand only."""
    from flows.commands.promotion_view import announce
    from flows.promotion import acts as promotion_acts

    announce(promotion_acts.rollback(runs, reason=reason, model=model))


@reports_errors
def approve(
    which: Which,
    reject: Annotated[bool, typer.Option("--reject", help="Say no.")] = False,
    reason: Reason = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not show transcripts, do not ask.")
    ] = False,
    model: Model = None,
    runs: Runs = RUNS,
) -> None:
    """Look at transcripts, then say whether a waiting release becomes the champion."""
    from flows.commands.promotion_view import announce, look_and_ask
    from flows.promotion.acts import approve as act

    if not yes:
        look_and_ask(runs, which, model, reject=reject)
    announce(act(runs, which, reject=reject, reason=reason, model=model))


@reports_errors
def history(
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
    last: Annotated[int, typer.Option(min=1, help="How many of the newest entries.")] = 30,
    repair: Annotated[
        bool, typer.Option("--repair", help="Bring MLflow's aliases in line with the ledger.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Who made what the champion, when and why; verifies the ledger on the way."""
    from flows.commands.promotion_view import show_history

    show_history(runs, model, as_json=as_json, last=last, repair=repair)
