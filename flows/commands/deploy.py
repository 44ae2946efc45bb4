"""`rl-pipeline deploy`, `devices enrol | status | rollback | drill`, `collect`."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.console import FAILED, reports_errors
from flows.commands.options import RUNS, Runs

DevicesFile = Annotated[
    str | None,
    typer.Option("--devices", "-d", help="File of devices; default: the profile's deploy.devices."),
]
Profile = Annotated[
    str | None,
    typer.Option("--config", "-c", help="Profile whose settings hold; default: the release's own."),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="This device only; may be repeated.")
]
Signers = Annotated[
    Path | None, typer.Option(help="File of pinned keys; default: the one runs sign with.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

devices_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The devices of configs/devices.yaml: enrol each once, then look, roll back, practise.\n\n"
    "Enrolment pins two things: the device's host key here, and the signing key there. From then "
    "on neither side believes anybody else.",
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog="Examples: rl-pipeline deploy --dry-run  ·  rl-pipeline deploy runs/latest --only "
        "orin-1  ·  rl-pipeline deploy calculator:3 --keep-going"
    )(deploy)
    app.add_typer(devices_app, name="devices")
    app.command(
        epilog="Examples: rl-pipeline collect --into drop  ·  after writing the right answers into "
        "the review file: rl-pipeline collect --accept runs/field/review-20260301.jsonl --into drop"
    )(collect)


@reports_errors
def deploy(
    what: Annotated[
        str,
        typer.Argument(
            help="`champion`, a bundle or archive, a run, a version (calculator:3), or a hash."
        ),
    ] = "champion",
    devices: DevicesFile = None,
    only: Only = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on with the others after one has failed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; touch nothing.")
    ] = False,
    config: Profile = None,
    allowed_signers: Signers = None,
    as_json: Json = False,
    runs: Runs = RUNS,
) -> None:
    """Take a release to the devices over SSH: one canary first, then waves.

    Each device checks the signature against the key pinned there, asks the new
    release its golden prompts beside the running one, switches, and checks health,
    golden prompts and speed. What fails is taken back; the old release serves again.
    Twice is once, and a transfer that was cut goes on where it stopped.
    """
    from flows.commands.deploy_view import DeployOptions, deploy_and_show

    options = DeployOptions(
        what,
        devices,
        tuple(only or ()),
        keep_going,
        dry_run,
        config,
        allowed_signers,
        as_json,
        runs,
    )
    if not deploy_and_show(options):
        raise typer.Exit(FAILED)


@devices_app.command(
    epilog="On the device: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub shows the fingerprint. "
    "Then here: rl-pipeline devices enrol orin-1 --fingerprint SHA256:..."
)
@reports_errors
def enrol(
    name: Annotated[str, typer.Argument(help="Name of the device in the file.")],
    fingerprint: Annotated[
        str | None,
        typer.Option(help="The device's host key, read on the device itself: SHA256:…"),
    ] = None,
    replace_host_key: Annotated[
        bool, typer.Option("--replace-host-key", help="The device was installed anew.")
    ] = False,
    replace_key: Annotated[
        bool, typer.Option("--replace-key", help="Bundles are signed with another key now.")
    ] = False,
    devices: DevicesFile = None,
    allowed_signers: Signers = None,
    runs: Runs = RUNS,
) -> None:
    """Pin a device's host key here and the signing key there; again changes nothing."""
    from flows.commands.devices_view import EnrolOptions, enrol_and_show

    enrol_and_show(
        EnrolOptions(
            name, fingerprint, replace_host_key, replace_key, devices, allowed_signers, runs
        )
    )


@devices_app.command(epilog="Example: rl-pipeline devices status --json")
@reports_errors
def status(
    devices: DevicesFile = None,
    only: Only = None,
    as_json: Json = False,
    runs: Runs = RUNS,
) -> None:
    """Ask every device what it serves, and compare with the books. Changes nothing there."""
    from flows.commands.devices_view import show_status

    if not show_status(devices, tuple(only or ()), runs, as_json=as_json):
        raise typer.Exit(FAILED)


@devices_app.command(epilog="Example: rl-pipeline devices rollback orin-2")
@reports_errors
def rollback(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of devices.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All devices of the file.")] = False,
    devices: DevicesFile = None,
    config: Profile = None,
    runs: Runs = RUNS,
) -> None:
    """Have devices serve the release before, with the checks of a deployment."""
    from flows.commands.devices_view import rollback_and_show

    if not rollback_and_show(tuple(names or ()), devices, config, runs, every=every):
        raise typer.Exit(FAILED)


@devices_app.command(epilog="Example: rl-pipeline devices drill orin-1")
@reports_errors
def drill(
    name: Annotated[str, typer.Argument(help="Name of the device.")],
    devices: DevicesFile = None,
    config: Profile = None,
    runs: Runs = RUNS,
) -> None:
    """Practise a rollback on one device and come back: how long would it take, does it work."""
    from flows.commands.devices_view import drill_and_show

    if not drill_and_show(name, devices, config, runs):
        raise typer.Exit(FAILED)


@reports_errors
def collect(
    into: Annotated[
        Path | None,
        typer.Option(help="Drop folder for rows that can train; default: nightly.drop_folder."),
    ] = None,
    accept: Annotated[
        Path | None,
        typer.Option(help="Take the rows of a review file that a person has given an answer."),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows taken from a device at most.")] = 5000,
    devices: DevicesFile = None,
    only: Only = None,
    config: Profile = None,
    runs: Runs = RUNS,
) -> None:
    """Bring back what users allowed to be taken: rows with a confirmed answer can train.

    What a verifier can work out, or a person has answered, goes to the drop folder
    of the next night. Everything else goes to a review file, for a person to answer.
    """
    from flows.commands.collect_view import CollectOptions, collect_and_show

    options = CollectOptions(into, accept, max_rows, devices, tuple(only or ()), config, runs)
    if not collect_and_show(options):
        raise typer.Exit(FAILED)
