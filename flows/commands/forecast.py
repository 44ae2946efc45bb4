"""`rl-pipeline forecast`: time, cost and the best split of devices, before a run is paid for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.console import console, reports_errors
from flows.commands.options import DEFAULT_PROFILE, RUNS, Overrides, Profile, Runs

COLUMNS = (
    "", "rollout : train", "η", "N", "samples/s", "age", "time", "cost", "$/1000 effective",
)  # fmt: skip

if TYPE_CHECKING:
    from flows.forecast import Outlook
    from tasks.rl.planner import Candidate, Plan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: rl-pipeline forecast -c gsm8k_qwen3_4b hardware=8gpu "
        "--what-if rl.publish.end=4 --what-if rl.loss.clip_high=0.2"
    )(forecast)


@reports_errors
def forecast(
    overrides: Overrides = None,
    config: Profile = DEFAULT_PROFILE,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure first: a dozen RL steps, and again with η = 0.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs, or cores; default: as configured.", show_default=False),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="KEY=VALUE", help="Compare with this changed."),
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Predict RL's time and cost, synchronous and asynchronous; advise split, η and interval.

    Uses what the profile's newest run measured, or a probe; without either, assumptions it names.
    """
    from configs.load import load_config
    from flows.commands.live import RunView
    from flows.forecast import figures_for, looked_at, outlook
    from flows.forecast import forecast as compare
    from flows.forecast import probe as measure

    out = console()
    loaded = load_config(config, overrides or [])
    if probe:
        with RunView(out) as view:
            measure(loaded, runs, view)
    figures = figures_for(loaded, runs, probed=probe)
    with out.status("modelling") as status:
        made = compare(
            loaded,
            figures,
            devices,
            lambda what, done, of: status.update(f"modelling {what} ({done + 1} of {of})"),
        )
        settings = [outlook("as configured", loaded, figures)]
        if what_if:
            changed = load_config(config, [*(overrides or []), *what_if])
            settings.append(outlook("with " + ", ".join(what_if), changed, figures))
    out.print(f"[bold]{escape(loaded.profile)}[/]: {escape(figures.source)}", soft_wrap=True)
    for sentence in figures.assumptions:
        out.print(f"[dim]  assumed: {escape(sentence)}[/]", soft_wrap=True)
    candidates = [c for c in (made.synchronous, made.asynchronous) if c is not None]
    best = [looked_at(candidate, loaded, figures.startup_s) for candidate in candidates]
    out.print(outlook_table([*settings, *best], loaded.rl.steps))
    if made.splits:
        out.print(splits_table(made))
    out.print(advice(made), soft_wrap=True)


def outlook_table(outlooks: Sequence["Outlook"], steps: int) -> Table:
    """One line for each setting: what it would take, cost and teach."""
    title = f"\n{steps} optimiser steps"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in COLUMNS:
        table.add_column(heading, overflow="fold")
    for look in outlooks:
        c = look.candidate
        table.add_row(
            escape(look.name),
            split_text(c),
            str(c.staleness_limit),
            interval_text(c),
            f"{c.samples_per_s:.1f}",
            f"{c.mean_age:.1f}",
            duration_text(look.wall_s),
            money_text(look.usd),
            money_text(look.usd_per_effective * 1000),
        )
    return table


def splits_table(made: "Plan") -> Table:
    """Throughput of every split, as a bar."""
    fastest = max(c.samples_per_s for c in (*made.splits, made.synchronous))
    title = f"\nsamples/s by rollout : train on {made.devices} devices"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "", "learner busy"):
        table.add_column(heading)
    for c in (made.synchronous, *made.splits):
        bar = "█" * max(1, round(40 * c.samples_per_s / fastest))
        table.add_row(split_text(c), f"{bar} {c.samples_per_s:.1f}", f"{c.learner_busy:.0%}")
    return table


def split_text(candidate: "Candidate") -> str:
    """`3 : 1`, or that both sides take turns on the same devices."""
    layout = candidate.layout
    if layout.shared:
        return f"{layout.devices}, in turns"
    return f"{layout.workers} : {layout.ranks}"


def interval_text(candidate: "Candidate") -> str:
    """`1`, or `1→2` where the interval is annealed."""
    publish = candidate.publish
    if publish.start == publish.end:
        return str(publish.start)
    return f"{publish.start}→{publish.end}"


def advice(made: "Plan") -> str:
    """What to set, in one line."""
    gain = f"asynchronous gives {made.gain:.2f} × the effective samples a second of synchronous"
    if made.asynchronous is None:
        return "\n[bold]stay synchronous[/]: one device cannot be split; rl.staleness_limit=0"
    if made.stay_synchronous:
        return f"\n[bold]stay synchronous[/]: {gain}, under 1.05; rl.staleness_limit=0"
    c = made.asynchronous
    return (
        f"\n[bold]go asynchronous[/]: {gain}; rl.staleness_limit={c.staleness_limit} "
        f"rl.publish.end={c.publish.end} rl.runtime.rollout_workers={c.layout.workers} "
        f"rl.runtime.learner_ranks={c.layout.ranks}"
    )


def money_text(usd: float) -> str:
    """`$12.30`, `$0.0042` where cents are too coarse."""
    if usd >= 0.1 or usd == 0:
        return f"${usd:.2f}"
    return f"${usd:.4f}" if usd >= 0.0001 else "< $0.0001"


def duration_text(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
