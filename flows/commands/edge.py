"""`rl-pipeline edge`: what an edge engineer asks before a bundle reaches a device."""

from typing import Annotated

import typer

from flows.commands.console import FAILED, reports_errors

edge = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan for a device: does a model fit, how fast can it be, what would help.",
)


@edge.command(
    epilog="Examples: rl-pipeline edge plan runs/latest  ·  "
    "rl-pipeline edge plan qwen3-4b --context 8192 --type Q5_K_M  ·  "
    "rl-pipeline edge plan policy/ --available 6100 --json"
)
@reports_errors
def plan(
    what: Annotated[
        str,
        typer.Argument(
            help="Bundle, run folder, GGUF, model folder, config.json, or a name as qwen3-4b."
        ),
    ],
    context: Annotated[
        int | None, typer.Option(help="Tokens of all slots together; default: the bundle's, 4096.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Sequences served at once.")] = 1,
    type_: Annotated[
        str | None, typer.Option("--type", help="Quantisation; default: the bundle's, Q4_K_M.")
    ] = None,
    ubatch: Annotated[int | None, typer.Option(help="Rows computed at once; default 128.")] = None,
    kv_type: Annotated[str, typer.Option(help="Type of the KV cache: F16 or Q8_0.")] = "F16",
    flash: Annotated[
        bool, typer.Option("--flash/--no-flash", help="Flash attention (llama-server's default).")
    ] = False,
    device: Annotated[str, typer.Option(help="The device.")] = "orin-nano-8gb",
    available: Annotated[
        int | None,
        typer.Option(help="MemAvailable read on the device, MiB; else its usual value.", min=1),
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="The device runs without a desktop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what fits into the device's memory, the speed bound of each power mode, and what helps.

    Ends with 1 where the chosen quantisation does not fit.
    """
    from flows.commands.edge_view import PlanOptions, show_plan

    options = PlanOptions(
        what=what,
        context=context,
        slots=slots,
        file_type=type_,
        ubatch=ubatch,
        kv_type=kv_type,
        flash=flash,
        device=device,
        available_mib=available,
        headless=headless,
    )
    if not show_plan(options, as_json=as_json):
        raise typer.Exit(FAILED)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(edge, name="edge")
