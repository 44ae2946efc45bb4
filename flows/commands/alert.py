"""`rl-pipeline alerts test | list`."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.console import FAILED, console, reports_errors

commands = typer.Typer(
    no_args_is_help=True,
    help="Who is told of failures, gates, promotions and cost; try it, and see what was sent.\n\n"
    "Addresses come from the environment, separated by spaces, in the form of Apprise: "
    "RL_PIPELINE_ALERT_URLS='mailtos://user:password@example.org slack://… jsons://example.org/x'",
    epilog="Example: rl-pipeline alerts test",
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(commands, name="alerts")


@commands.command("test", epilog="Example: RL_PIPELINE_ALERT_URLS=… rl-pipeline alerts test")
@reports_errors
def send_test(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.", show_default=False),
    ] = None,
    config: Annotated[
        str, typer.Option("--config", "-c", help="Profile whose `alerts` block is used.")
    ] = "calculator",
    runs: Annotated[Path, typer.Option("--runs", help="Folder of runs.")] = Path("runs"),
) -> None:
    """Send a test message to every address, and say who took it."""
    from configs.load import load_config
    from flows.alerts.send import TEST_EVENT, Alert, send_alert
    from flows.commands.alerts_view import show_outcome

    loaded = load_config(config, overrides or [])
    alert = Alert(
        TEST_EVENT,
        f"rl-pipeline: test of alerts ({loaded.profile})",
        "If you read this, alerts of the pipeline reach you. Nothing has happened.",
        TEST_EVENT,
    )
    with console(stderr=True).status(f"sending, at most {loaded.alerts.timeout_s:g} s"):
        outcome = send_alert(loaded.alerts, alert, runs)
    if not show_outcome(outcome, loaded.alerts):
        raise typer.Exit(FAILED)


@commands.command("list", epilog="Example: rl-pipeline alerts list --last 5 --json")
@reports_errors
def show_list(
    last: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of runs.")] = Path("runs"),
) -> None:
    """Alerts of this runs folder, newest last, and whom they reached."""
    from flows.commands.alerts_view import show_alerts

    show_alerts(runs, last, as_json)
