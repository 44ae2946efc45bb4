"""What `rl-pipeline collect` does: ask the devices, show what came and what it is good for."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from configs.devices import choose, load_fleet
from configs.load import load_config
from configs.schema import PipelineConfig
from deployment.fleet.collect import accept, collect
from flows.commands.console import console
from flows.commands.deploy_view import plain

DEFAULT_DROP = "drop"


@dataclass(frozen=True)
class CollectOptions:
    """What `rl-pipeline collect` was given."""

    into: Path | None
    accept: Path | None
    max_rows: int
    devices: str | None
    only: tuple[str, ...]
    config: str | None
    runs: Path


def collect_and_show(options: CollectOptions) -> bool:
    """Collect, or accept a review file; True where every device answered.

    Raises:
        ConfigError, ReviewFileError: nothing was asked for.
    """
    settings = load_config(options.config) if options.config else PipelineConfig()
    into = options.into or Path(settings.nightly.drop_folder or DEFAULT_DROP)
    if options.accept is not None:
        return _accept(options.accept, into)
    fleet = load_fleet(options.devices or settings.deploy.devices)
    out = console()
    with console(stderr=True).status("asking the devices"):
        done = collect(
            choose(fleet, options.only),
            Path(fleet.known_hosts),
            options.runs,
            into,
            max_rows=options.max_rows,
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("device")
    table.add_column("rows", overflow="fold")
    for name, counts in done.counts.items():
        said = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        table.add_row(name, plain(said) or "none")
    for name, why in done.failed.items():
        table.add_row(f"[red]{name}[/]", plain(why))
    out.print(table)
    if done.training is not None:
        out.print(f"{done.training_rows} rows can train: {done.training}", soft_wrap=True)
    if done.review is not None:
        out.print(
            f"{done.review_rows} rows need a person: write the right `answer` into {done.review}, "
            f"then: rl-pipeline collect --accept {done.review}",
            soft_wrap=True,
        )
    if done.training is None and done.review is None:
        out.print("nothing new")
    return not done.failed


def _accept(review: Path, into: Path) -> bool:
    path, taken, left = accept(review, into)
    out = console()
    if path is None:
        out.print(f"no row of {review} has an `answer` yet ({left} wait)", soft_wrap=True)
        return False
    out.print(f"{taken} rows can train: {path}; {left} wait for an answer", soft_wrap=True)
    return True
