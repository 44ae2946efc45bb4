"""`rl-pipeline quantise`: the file that fits a size or an accuracy, and why it is that one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.console import console, reports_errors

if TYPE_CHECKING:
    from rich.console import Console

    from flows.fidelity.quantise import Result
    from quantize.frontier import Point


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Examples: rl-pipeline quantise runs/latest --target-size 600KB  ·  "
        "rl-pipeline quantise runs/latest --target-accuracy 0.97 --problems 600  ·  "
        "rl-pipeline quantise runs/store/rl/KEY/policy --type IQ2_M -c calculator"
    )(quantise)


@reports_errors
def quantise(
    path: Annotated[Path, typer.Argument(help="A run's folder, or a policy beside its rollouts.")],
    target_size: Annotated[
        str | None,
        typer.Option(help="At most so large, as in 600KB or 1.5MiB; the nearest to F16 is picked."),
    ] = None,
    target_accuracy: Annotated[
        float | None,
        typer.Option(help="At least so accurate, interval included; the smallest is picked."),
    ] = None,
    type_: Annotated[
        str | None, typer.Option("--type", help="IQ2_M, Q4_K_M, Q5_K_M or Q8_0.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; default: quantise/ in the run's folder, or quantised/."),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out problems each file answers; default: the profile's."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="Profile, where the folder is no run's."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: all cores.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with heldout.jsonl, where the folder is no run's.")
    ] = None,
) -> None:
    """Pick a quantisation by size, accuracy or type from everything worth making.

    Types, and mixes of them with single tensors raised, are made and measured; the frontier of size
    against fidelity is written as frontier.json, PNG and SVG, and the picked file as GGUF.
    """
    from configs.load import load_config
    from quantize.frontier import Wish, parse_size

    size = None if target_size is None else parse_size(target_size)
    wish = Wish(size, target_accuracy, type_)

    from flows.fidelity.quantise import find_policy, quantise_policy
    from tasks.artifacts.machine import usable_cores

    show = console()
    profile = None if config is None else load_config(config, [])
    policy = find_policy(path, profile, data)
    result = quantise_policy(
        policy,
        wish,
        out or policy.out_dir,
        problems=problems,
        threads=threads or usable_cores(),
        progress=lambda text: show.print(f"[dim]{escape(text)}[/]"),
    )
    show_result(result, show)


def show_result(result: "Result", show: "Console") -> None:
    """The table, the pick and its reason, and where the files are."""
    show.print(points_table(result.points, result.choice.point))
    show.print(f"picked [bold]{escape(result.choice.point.name)}[/]: {escape(result.choice.why)}")
    for tensor, kind in result.choice.point.raised:
        show.print(f"  {escape(tensor)} as {escape(kind)}")
    if result.choice.point.ships is False:
        show.print("[yellow]its gate does not pass[/]: `rl-pipeline run` would not ship this file")
    show.print(f"file: {escape(str(result.file))}", soft_wrap=True)
    show.print(f"plot: {escape(', '.join(map(str, result.plots)))}", soft_wrap=True)


def points_table(points: "Sequence[Point]", picked: "Point") -> Table:
    """One line for each file, small to large."""
    from quantize.frontier import frontier

    best = {p.name for p in frontier(points)}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "file", "bytes", "bits/weight", "KL nats", "accuracy, 95 %", "gate"):
        table.add_column(heading)
    for point in points:
        accuracy = point.accuracy
        gate = {True: "[green]passes[/]", False: "[red]fails[/]", None: "[dim]not judged[/]"}
        table.add_row(
            "→" if point is picked else "·" if point.name in best else "",
            escape(point.name),
            f"{point.size_bytes:,}",
            f"{point.bits_per_weight:.2f}",
            f"{point.kld.value:.2e}",
            "not measured"
            if accuracy is None
            else f"{accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]".replace(
                "[", r"\["
            ),
            gate[point.ships],
        )
    return table
