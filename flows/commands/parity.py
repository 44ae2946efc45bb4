"""`rl-pipeline parity`: F16 and quantised files side by side on the same prompts."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.console import console, reports_errors


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: rl-pipeline parity runs/latest --problems 400, then open the page it names"
    )(parity)


@reports_errors
def parity(
    path: Annotated[Path, typer.Argument(help="A run's folder, or a bundle.")],
    problems: Annotated[
        int, typer.Option(min=1, help="Held-out problems answered by every file.")
    ] = 256,
    f16: Annotated[
        Path | None, typer.Option(help="Another F16 file than the run's own.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the page; default: parity/ in the run's folder.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: all cores.", show_default=False)
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of runs.")] = Path("runs"),
) -> None:
    """Say where a loss comes from: RL, or quantisation.

    F16 and every quantised file answer the same prompts greedily: the first token at which they
    part, KL at each position, answers that flip in both directions with their transcripts.
    """
    from flows.fidelity.parity import compare, sides_of, write_result
    from tasks.artifacts.machine import usable_cores

    show = console()
    sides = sides_of(path, runs, problems, f16)
    show.print(f"{escape(sides.title)}: {len(sides.rows)} held-out problems", soft_wrap=True)
    figures = compare(
        sides,
        threads=threads or usable_cores(),
        progress=lambda text: show.print(f"[dim]{escape(text)}[/]"),
    )
    page = write_result(figures, out or sides.run_dir / "parity")
    show.print(figures_table(figures))
    show.print(escape(figures["attribution"]), soft_wrap=True)
    show.print(f"page: {escape(str(page))}", soft_wrap=True)


def figures_table(figures: dict[str, Any]) -> Table:
    """One line for each file."""
    from flows.report.side_by_side import rows_of

    headings = {
        "name": "file",
        "accuracy": "accuracy",
        "delta": "minus F16, 95 %",
        "lost": "lost",
        "gained": "gained",
        "identical": "same answer",
        "median": "parts at token",
        "kl": "KL nats",
    }
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for key, heading in headings.items():
        grid.add_column(heading, justify="left" if key == "name" else "right", overflow="fold")
    for row in rows_of(figures):
        grid.add_row(*(escape(str(row[key])) for key in headings))
    return grid
