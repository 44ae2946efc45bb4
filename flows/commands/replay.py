"""`rl-pipeline replay`: a run's rewards and advantages under today's code."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.console import FAILED, console, reports_errors
from flows.commands.options import Overrides

if TYPE_CHECKING:
    from flows.replay import ReplayResult
    from tasks.rl.replay import Replayed

SHOWN = 10
LONGEST = 60
"""Characters of a text in the table."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Examples: rl-pipeline replay runs/latest, after a change to a verifier; "
        "rl-pipeline replay runs/latest rl.credit.type=rloo, for what another credit would push"
    )(replay)


@reports_errors
def replay(
    path: Annotated[Path, typer.Argument(help="A run's folder.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the differences; default: replay.jsonl in the run's folder."),
    ] = None,
) -> None:
    """Grade every sample a run trained on once more, and compare with what it earned then.

    Exit status 1 where anything differs: rewards changed under a run that is to be trusted.
    """
    from flows.replay import DIFFERENCES, replay_run, write_differences

    show = console()
    with show.status("replaying") as status:
        result = replay_run(
            path,
            overrides or [],
            lambda done, of: status.update(f"replaying batch {done + 1} of {of}"),
        )
    show.print(escape(summary(result)), soft_wrap=True)
    if not result.differences:
        return
    show.print(differences_table(result.differences[:SHOWN]))
    written = write_differences(result, out or path / DIFFERENCES)
    show.print(f"all {len(result.differences)}: {escape(str(written))}", soft_wrap=True)
    raise typer.Exit(FAILED)


def summary(result: "ReplayResult") -> str:
    """What there was, and how much of it differs, in one line."""
    graded = f"{result.run}: {result.samples} samples of {result.batches} batches graded again; "
    differ = f"{result.outcomes} outcomes and {result.rewards} rewards differ; "
    if result.advantages is None:
        return graded + differ + "advantages hang on the learner of then, and are not compared"
    return graded + differ + f"{result.advantages} advantages differ"


def differences_table(differences: list["Replayed"]) -> Table:
    """The first samples that differ."""
    table = Table(title="\ndifferent", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("batch", "sample", "row", "answer", "outcome", "reward", "advantages"):
        table.add_column(heading, overflow="fold")
    for d in differences:
        text = d.text if len(d.text) <= LONGEST else d.text[:LONGEST] + "…"
        table.add_row(
            str(d.batch),
            escape(d.rollout_id),
            escape(d.row_id),
            escape(repr(text)),
            f"{_said(d.outcome_then)} → {_said(d.outcome_now)}",
            f"{_said(d.reward_then)} → {_said(d.reward_now)}",
            f"{_listed(d.advantages_then)} → {_listed(d.advantages_now)}",
        )
    return table


def _said(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.3g}"


def _listed(values: tuple[float, ...] | None) -> str:
    return "not told" if values is None else ", ".join(f"{v:+.2f}" for v in values)
