"""What `rl-pipeline deploy` does: a live line a device, the outcome as a table."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from configs.devices import choose
from configs.load import load_config
from deployment.fleet.device import DeviceResult
from deployment.fleet.enrol import not_enrolled
from deployment.fleet.fleet import FleetEvent
from flows.commands.console import console

if TYPE_CHECKING:
    from flows.devices.flow import Order

OUTCOMES = {
    "deployed": "[green]deployed[/]",
    "unchanged": "[green]unchanged[/]",
    "failed": "[bold red]failed[/]",
    "not_tried": "[dim]not tried[/]",
}


@dataclass(frozen=True)
class DeployOptions:
    """What `rl-pipeline deploy` was given."""

    what: str
    devices: str | None
    only: tuple[str, ...]
    keep_going: bool
    dry_run: bool
    config: str | None
    allowed_signers: Path | None
    as_json: bool
    runs: Path


def plain(text: str) -> str:
    """Text of a device or a model for the terminal: no control characters, no markup."""
    return escape("".join(c if c.isprintable() else " " for c in text))


def deploy_and_show(options: DeployOptions) -> bool:
    """Deploy, or show what would be; True where every device serves the release.

    Raises:
        ConfigError, BundleError, DeployError: nothing was started.
    """
    from flows.devices.flow import deploy_release, failure_text, find_order

    order = find_order(
        options.what,
        options.runs,
        config=load_config(options.config) if options.config else None,
        profile=options.config and load_config(options.config).profile,
        devices=options.devices,
        only=options.only,
        keep_going=options.keep_going,
        allowed_signers=options.allowed_signers,
    )
    out = console(stderr=options.as_json)
    if options.dry_run:
        return _show_plan(order, out)
    with watching(out) as listener:
        done = deploy_release(order, listener)
    if options.as_json:
        rows = [_as_json(result) for result in done.result.results]
        body = {"release": done.result.release, "devices": rows, "notes": list(done.notes)}
        console().print_json(json.dumps(body))
    else:
        out.print(results_table(done.result.results, f"release {done.result.release[:12]}"))
    for note in done.notes:
        out.print(f"[yellow]![/] {plain(note)}", soft_wrap=True)
    if not done.result.ok:
        out.print(f"[bold red]error[/] {plain(failure_text(done.result))}", soft_wrap=True)
        out.print("[dim]  next: correct it, then the same command; what has arrived is kept[/]")
    return done.result.ok


def _show_plan(order: "Order", out: Console) -> bool:
    from deployment.fleet.cargo import loaded
    from flows.devices.flow import pinned, planned_waves

    fleet = order.fleet
    devices = {d.name: d for d in choose(fleet, order.only)}
    strangers = not_enrolled(tuple(devices.values()), Path(fleet.known_hosts))
    with loaded(order.bundle, pinned(order.runs_dir, order.allowed_signers)) as cargo:
        size = cargo.archive.stat().st_size
        out.print(
            f"release {cargo.sha12} of agent {plain(cargo.agent)}, {size:,} bytes to send, "
            f"verified here: {plain(cargo.source)}",
            soft_wrap=True,
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("wave", "device", "where", "service", ""):
        table.add_column(heading, overflow="fold")
    for number, wave in enumerate(planned_waves(order)):
        for name in wave:
            d = devices[name]
            enrolled = "[red]not enrolled[/]" if name in strangers else "enrolled"
            where = f"{d.user}@{d.host}:{d.port} {d.root}"
            label = "canary" if number == 0 else str(number)
            table.add_row(label, name, escape(where), d.service, enrolled)
    out.print(table)
    keep = order.config.deploy
    stops = "goes on after a failure" if order.keep_going else "stops at the first failure"
    out.print(
        f"{stops}; at least {keep.min_tokens_per_s:g} tokens/s, healthy within "
        f"{keep.health_timeout_s:g} s. Nothing was touched"
    )
    return not strangers


def results_table(results: Sequence[DeviceResult], title: str) -> Table:
    """One line a device, what went wrong below it."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("device", "outcome", "serving", "tokens/s", "s", "why"):
        table.add_column(heading, overflow="fold")
    for r in results:
        speed = "" if r.tokens_per_s is None else f"{r.tokens_per_s:.1f}"
        serving = (r.serving or "not known")[:12] if r.outcome != "not_tried" else ""
        why = r.reason or r.golden
        row = (r.device, OUTCOMES[r.outcome], plain(serving), speed, f"{r.seconds:.0f}", plain(why))
        table.add_row(*row)
    return table


def _as_json(result: DeviceResult) -> dict[str, object]:
    return {**vars(result), "ok": result.ok}


@contextmanager
def watching(out: Console) -> Iterator[Callable[[FleetEvent], None]]:
    """A listener that shows a live line a device; plain lines where there is no terminal."""
    if not out.is_terminal:
        yield lambda event: _plain_line(event, out)
        return
    columns = (TextColumn("{task.fields[device]}"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=out) as progress:
        tasks: dict[str, object] = {}

        def listen(event: FleetEvent) -> None:
            if event.kind == "wave":
                return
            if event.device not in tasks:
                tasks[event.device] = progress.add_task("", device=event.device, total=None)
            progress.update(tasks[event.device], description=described(event))  # type: ignore[arg-type]

        yield listen


def described(event: FleetEvent) -> str:
    """What a device is doing, in words."""
    if event.kind == "sent":
        done, _, size = event.text.partition("/")
        share = int(done) / max(1, int(size))
        return f"sending: {share:.0%} of {int(size):,} bytes"
    return OUTCOMES[event.text] if event.kind == "result" else plain(event.text)


def _plain_line(event: FleetEvent, out: Console) -> None:
    if event.kind == "wave":
        out.print(f"wave: {plain(event.text)}", soft_wrap=True)
    elif event.kind != "sent":
        out.print(f"{plain(event.device)}: {described(event)}", soft_wrap=True)
