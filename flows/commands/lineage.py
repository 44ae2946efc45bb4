"""`rl-pipeline lineage`: from a device to the prompts it learnt from, and back."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.console import console, reports_errors
from flows.commands.options import RUNS, Runs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Examples: rl-pipeline lineage runs/latest  ·  rl-pipeline lineage jetson-1  ·  "
        "rl-pipeline lineage champion --html lineage.html  ·  rl-pipeline lineage calc-8ada669111a5"
    )(lineage)


@reports_errors
def lineage(
    thing: Annotated[
        str,
        typer.Argument(
            help="A device, a bundle (folder, archive), a run's folder, a model version "
            "(calculator/3, champion, previous), a sha256 or its beginning, or a data row's id."
        ),
    ],
    runs: Runs = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a tree.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write the graph as a page of its own.")
    ] = None,
    mlflow: Annotated[
        bool, typer.Option(help="Ask MLflow for what the disk no longer has.")
    ] = True,
) -> None:
    """Walk both ways: what a thing was made from, and what was made from it.

    Follows content hashes from the device over the bundle, the quantisations, the policy and the
    snapshot to the prompts, and names what can no longer be found.
    """
    from flows.lineage.page import write_lineage_page
    from flows.lineage.query import resolve
    from flows.lineage.show import as_json as body
    from flows.lineage.show import as_text
    from flows.lineage.sources import fill_from_mlflow, gather
    from tasks.tracking.tracker import reading_speaker

    graph = gather(runs)
    node = resolve(graph, runs, thing)
    gone = any(not n.found for n in graph.around(node.key).nodes())
    if mlflow and gone and (speaker := reading_speaker(runs)) is not None:
        fill_from_mlflow(graph, speaker)
    out = console()
    if as_json:
        typer.echo(json.dumps(body(graph, node), indent=2, sort_keys=True))
    else:
        out.print(as_text(graph, graph.node(node.key)), soft_wrap=True)
    if html is not None:
        write_lineage_page(graph, graph.node(node.key), html)
        if not as_json:
            out.print(f"page: {html}", soft_wrap=True)
