"""`rl-pipeline`: prompts to a signed, quantised agent. Heavy imports stay inside the commands."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.console import (
    DEBUG,
    FAILED,
    INTERRUPTED,
    console,
    findings_table,
    log_to_stderr,
    reports_errors,
    show_interrupted,
)
from flows.commands.options import DEFAULT_PROFILE, RUNS, Overrides, Profile, Runs

CONTEXT = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
    help="Takes a language model from prompts to a signed, quantised agent on a Jetson Orin Nano."
    "\n\n"
    "First try: [bold]rl-pipeline run[/] trains a calculator agent on this machine, no network.\n\n"
    "Before: [bold]rl-pipeline doctor[/] and [bold]rl-pipeline check[/]. "
    "After: [bold]rl-pipeline serve runs/latest[/].",
    epilog="Settings: rl-pipeline config rl  ·  any key on the command line: rl.steps=20",
)

Force = Annotated[
    list[str] | None, typer.Option("--force", help="Run this stage anew; may be repeated.")
]


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and logs.")] = False,
) -> None:
    """Options of every command."""
    DEBUG.set(debug)
    log_to_stderr(debug)


@app.command(
    epilog="Example: rl-pipeline run -c configs/calculator.yaml rl.steps=20 --force rl "
    "--stop-after rl"
)
@reports_errors
def run(
    overrides: Overrides = None,
    config: Profile = DEFAULT_PROFILE,
    force: Force = None,
    stop_after: Annotated[
        str | None, typer.Option("--stop-after", help="Stop when this stage is done.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Start although doctor refuses this profile here.")
    ] = False,
    nightly: Annotated[
        bool, typer.Option("--nightly", help="Be a night: new prompts, and only if there are any.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Run the pipeline: data, SFT, RL, evaluation, quantisation, bundle.

    Stages whose inputs did not change are reused; a killed run goes on from its checkpoint.
    """
    from flows.commands.run_view import RunOptions, run_and_show

    options = RunOptions(config, overrides or [], force or [], stop_after, runs, anyway, nightly)
    run_and_show(options)


@app.command(epilog="Example: rl-pipeline plan -c configs/calculator.yaml rl.steps=20")
@reports_errors
def plan(
    overrides: Overrides = None,
    config: Profile = DEFAULT_PROFILE,
    force: Force = None,
    runs: Runs = RUNS,
) -> None:
    """Say for each stage HIT (reused) or RUN, and why. Starts nothing."""
    from flows.commands.run_view import show_plan

    show_plan(config, overrides or [], force or [], runs)


@app.command(epilog="Example: rl-pipeline check -c configs/calculator.yaml rl.kl.coefficient=0")
@reports_errors
def check(
    overrides: Overrides = None,
    config: Profile = DEFAULT_PROFILE,
    runs: Runs = RUNS,
) -> None:
    """Pre-flight table: prompts, reference, LoRA, sampling, rewards, KL, evaluation, parity."""
    from configs.load import load_config
    from flows.doctor.checklist import check_profile
    from flows.doctor.findings import worst

    loaded = load_config(config, overrides or [])
    findings = check_profile(loaded, runs)
    console().print(findings_table(findings, f"pre-flight: {loaded.profile}"))
    if worst(findings) == "fail":
        raise typer.Exit(FAILED)


@app.command(epilog="Example: rl-pipeline doctor -c configs/gsm8k_qwen2.5_0.5b.yaml")
@reports_errors
def doctor(
    overrides: Overrides = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="Can this profile run here? Without one: all of them."),
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Look at this machine, remedies included; with -c, say whether a profile can run here."""
    from flows.commands.doctor_view import show_machine, show_profile, show_profiles

    healthy = show_machine(runs)
    if config is None:
        show_profiles(runs)
    else:
        healthy = show_profile(config, overrides or [], runs) and healthy
    if not healthy:
        raise typer.Exit(FAILED)


@app.command(epilog="Example: rl-pipeline report runs/latest")
@reports_errors
def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of one run.")] = RUNS / "latest",
) -> None:
    """Write a run's report.html anew: curves, parity, transcripts, lineage in one file."""
    from flows.report.page import write_report

    console().print(f"{write_report(run_dir)}", soft_wrap=True)


@app.command(
    epilog="Example: rl-pipeline serve runs/latest, then "
    "curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' "
    """-d '{"messages":[{"role":"user","content":"34*7-52=?"}]}'"""
)
@reports_errors
def serve(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder, or a run's folder.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allowed_signers: Annotated[
        Path | None, typer.Option(help="File of pinned keys; default: the one runs sign with.")
    ] = None,
) -> None:
    """Verify a bundle, then answer OpenAI-style chat requests, tool calls included."""
    from flows.commands.bundle_view import serve_bundle

    serve_bundle(bundle, allowed_signers, port, host)


@app.command(epilog="Example: rl-pipeline verify runs/latest --allowed-signers allowed_signers")
@reports_errors
def verify(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder, or a run's folder.")],
    allowed_signers: Annotated[
        Path | None, typer.Option(help="File of pinned keys; default: the one runs sign with.")
    ] = None,
) -> None:
    """Check every byte of a bundle and its signature against the pinned key."""
    from flows.commands.bundle_view import verify_and_show

    verify_and_show(bundle, allowed_signers)


@app.command(name="config", epilog="Example: rl-pipeline config rl.credit")
@reports_errors
def explain(
    path: Annotated[str, typer.Argument(help="Key or block; empty lists the blocks.")] = "",
    profile: Annotated[
        str | None, typer.Option("--config", "-c", help="Show the values of this profile too.")
    ] = None,
) -> None:
    """Explain keys: type, what is allowed, default, meaning."""
    from flows.commands.config_view import show_keys

    show_keys(path, profile)


@app.command(epilog="Example: rl-pipeline upload runs/latest --uri http://127.0.0.1:5000")
@reports_errors
def upload(
    run_dir: Annotated[Path, typer.Argument(help="Folder of one run.")] = RUNS / "latest",
    uri: Annotated[
        str | None, typer.Option(help="Another MLflow store than the run's own.")
    ] = None,
) -> None:
    """Log to MLflow what a run could not log while the store was locked or away."""
    from tasks.tracking.tracker import upload_pending

    said = upload_pending(run_dir.resolve(), uri)
    console().print(f"{said} operations uploaded" if said else "nothing was pending")


COMMANDS: tuple[str, ...] = (
    "flows.commands.nightly",
    "flows.commands.lineage",
    "flows.commands.retention",
    "flows.commands.alert",
    "flows.commands.quarantine",
    "flows.commands.edge",
    "flows.commands.services",
    "flows.commands.promotion",
    "flows.commands.parity",
    "flows.commands.quantise",
    "flows.commands.deploy",
    "flows.commands.forecast",
    "flows.commands.replay",
)
"""Modules with further commands; each has `register(app)` and imports what it needs late."""

PANELS = {
    "Run": ("run", "plan", "forecast", "check", "doctor", "config", "report"),
    "Serve and ship": ("serve", "verify", "edge", "devices", "deploy", "collect"),
    "Every night": ("up", "down", "ps", "nightly", "reconcile", "alerts", "backup", "gc"),
    "Champion": ("promote", "rollback", "approve", "history"),
    "Look closer": ("lineage", "parity", "quantise", "quarantine", "replay", "upload"),
}
"""How `--help` groups the commands."""


def _register() -> None:
    """Add the commands of every module, and sort them all into panels."""
    for module in COMMANDS:
        import_module(module).register(app)
    panel_of = {name: panel for panel, names in PANELS.items() for name in names}
    order = list(panel_of)
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        command.name, command.rich_help_panel = name, panel_of[name]
    for group in app.registered_groups:
        group.rich_help_panel = panel_of[str(group.name)]
    app.registered_commands.sort(key=lambda c: order.index(str(c.name)))


_register()


def main() -> None:
    """The console script; `--debug` may stand anywhere."""
    arguments = sys.argv[1:]
    if "--debug" in arguments:
        arguments = ["--debug", *(a for a in arguments if a != "--debug")]
    try:
        app(args=arguments, prog_name="rl-pipeline")
    except KeyboardInterrupt:
        show_interrupted()
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
