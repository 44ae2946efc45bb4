"""What `promote`, `rollback`, `approve` and `history` show."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from flows.commands.console import console
from flows.promotion.acts import Act, ApprovalError, waiting_entry
from flows.promotion.news import deploy_if_asked, move_aliases, spread
from flows.promotion.releases import choose_ledger, config_of, find_release
from flows.promotion.transcripts import transcripts_of
from tasks.tracking.promotion_ledger import Entry, PromotionLedger, ledgers

MARKS = {
    "promote": "[bold green]promote[/]",
    "approve": "[bold green]approve[/]",
    "rollback": "[yellow]rollback[/]",
    "reject": "[red]reject[/]",
    "candidate": "[dim]candidate[/]",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Text of a model or a file for a terminal: no markup, no control characters."""
    return escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def announce(act: Act) -> None:
    """Say what was written, tell MLflow and people, resume a waiting flow, start a deployment."""
    entry, ledger, out = act.entry, act.ledger, console()
    runs_dir = ledger.path.parent.parent
    release, config = entry.release, config_of(entry.release, runs_dir)
    out.print(
        f"{MARKS[entry.action]} {plain(release.name)}  "
        f"[dim]bundle {release.bundle_sha256[:12]}, entry {entry.sequence} of {ledger.path}[/]",
        soft_wrap=True,
    )
    with console(stderr=True).status("MLflow's aliases, alerts"):
        notes = spread(entry, ledger, config)
        if entry.action in ("approve", "reject"):
            notes += _resume(entry, ledger, runs_dir)
    for note in notes:
        out.print(f"[yellow]![/] {plain(note)}", soft_wrap=True)
    if entry.action in ("promote", "approve", "rollback"):
        said = deploy_if_asked(release, config, runs_dir) if entry.action == "approve" else None
        after = said or "to the devices: rl-pipeline deploy"
        out.print(f"champion of {plain(release.model)}: v{release.version}; {plain(after)}")


def _resume(entry: Entry, ledger: PromotionLedger, runs_dir: Path) -> list[str]:
    """Resume the flow run that waits for this answer; returns why it could not be."""
    asked = entry.evidence.get("answers")
    waiting = [e for e in ledger.entries() if e.sequence == asked]
    flow_run_id = waiting[0].evidence.get("flow_run_id") if waiting else None
    if not isinstance(flow_run_id, str):
        return []
    from flows.promotion.resume import resume_waiting

    problem = resume_waiting(flow_run_id, entry, runs_dir)
    return [] if problem is None else [problem]


def look_and_ask(runs_dir: Path, which: str, model: str | None, *, reject: bool) -> None:
    """Show what the release said beside the champion, then ask.

    Raises:
        ApprovalError: it does not wait, or there is nobody to ask.
        typer.Abort: the person does not want to.
    """
    release = find_release(runs_dir, which, model)
    entry = waiting_entry(PromotionLedger(runs_dir, release.model), release.bundle_sha256)
    out = console()
    out.print(f"[bold]{plain(entry.release.name)}[/]: {plain(entry.reason)}", soft_wrap=True)
    show_transcripts(transcripts_of(runs_dir / entry.release.run_id), out)
    if not sys.stdin.isatty():
        raise ApprovalError("nobody to ask: no terminal. Look at the above, then give --yes")
    typer.confirm(f"{'Reject' if reject else 'Approve'} {entry.release.name}?", abort=True)


def show_transcripts(shown: list[dict[str, Any]], out: Console) -> None:
    """Pairs of answers, side by side."""
    if not shown:
        out.print("[yellow]the run left no transcripts to look at[/]")
    for pair in shown:
        out.print(f"\n[bold]{plain(pair['prompt'])}[/]  gold {plain(pair['gold'])}  "
                  f"[dim]{plain(pair['kind'])}[/]")  # fmt: skip
        panels = []
        for side in pair["sides"]:
            said = "\n".join(f"{plain(m['role'])}: {plain(m['content'])}" for m in side["messages"])
            title = f"{plain(side['name'])}: {plain(side['outcome'])}"
            panels.append(Panel(said or "(nothing)", title=title, title_align="left"))
        out.print(Columns(panels, equal=True, expand=True))


def show_history(
    runs_dir: Path, model: str | None, *, as_json: bool, last: int, repair: bool
) -> None:
    """Every ledger, or one: its entries, champion, previous; the chain is verified.

    Raises:
        LedgerError: a ledger cannot be relied on; names the line.
        NoReleaseError: no such ledger.
    """
    out = console()
    chosen = [choose_ledger(runs_dir, model)] if model else ledgers(runs_dir)
    if as_json:
        body = [_as_json(ledger) for ledger in chosen]
        sys.stdout.write(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
        return
    if not chosen:
        out.print(f"nothing was packaged in {plain(str(runs_dir))} yet: rl-pipeline run")
    for ledger in chosen:
        if repair:
            ledger.recover()
        _show(ledger, last, out)
        if repair and (entries := ledger.entries()):
            config = config_of(entries[-1].release, runs_dir)
            problem = move_aliases(ledger, config, runs_dir)
            told = f"[yellow]![/] {plain(problem)}" if problem else "MLflow's aliases agree"
            out.print(told, soft_wrap=True)


def _as_json(ledger: PromotionLedger) -> dict[str, Any]:
    state = ledger.state()
    return {
        "model": ledger.model,
        "ledger": str(ledger.path),
        "verified_entries": ledger.verify(),
        "champion": state.champion.model_dump(mode="json") if state.champion else None,
        "previous": state.previous.model_dump(mode="json") if state.previous else None,
        "entries": [entry.model_dump(mode="json") for entry in ledger.entries()],
    }


def _show(ledger: PromotionLedger, last: int, out: Console) -> None:
    count, state = ledger.verify(), ledger.state()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("#", "time (UTC)", "", "version", "by", "why"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "#" else "left")
    for entry in ledger.entries()[-last:]:
        table.add_row(
            str(entry.sequence),
            plain(entry.time[:19].replace("T", " ")),
            MARKS[entry.action],
            f"v{entry.release.version}",
            plain(entry.actor),
            plain(" ".join(entry.reason.split())),
        )
    champion = state.champion.name if state.champion else "nobody"
    previous = state.previous.name if state.previous else "nobody"
    out.print(table)
    out.print(
        f"{plain(ledger.model)}: champion {plain(champion)}, previous {plain(previous)}; "
        f"{count} entries, the chain verifies",
        soft_wrap=True,
    )
