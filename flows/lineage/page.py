"""The lineage of one thing as a page of its own: no network, no script, opens from a file."""

from pathlib import Path
from statistics import mean

from markupsafe import Markup

from flows.lineage.graph import Lineage, LineageQueryError
from flows.lineage.graph import Node as Thing
from flows.lineage.query import resolve
from flows.lineage.show import HASH_CHARS, missing
from flows.lineage.sources import gather
from flows.report.graph import Edge, Node, lineage_graph
from flows.report.pages import page_template
from flows.report.text import clipped_line
from tasks.artifacts import write_atomic

_TEMPLATE = Path(__file__).with_name("lineage_template.html.j2")
TITLE_CHARS, DETAIL_CHARS = 18, 22


def write_lineage_page(graph: Lineage, thing: Thing, path: Path) -> Path:
    """Write the page.

    Raises:
        ArtifactWriteError: the disk refused.
    """
    return write_atomic(path, render(graph, thing))


def write_run_lineage(runs_dir: Path, run_dir: Path) -> Path | None:
    """The page of what a run made last, in the run's folder; None where it made nothing.

    Raises:
        ArtifactWriteError: the disk refused.
    """
    graph = gather(runs_dir)
    try:
        thing = resolve(graph, runs_dir, str(run_dir))
    except LineageQueryError:
        return None
    return write_lineage_page(graph, thing, run_dir / "lineage.html")


def render(graph: Lineage, thing: Thing) -> str:
    """The page as text; every value is escaped, marks stand for what does not print."""
    around = graph.around(thing.key)
    rows = [_row(around, node) for column in around.generations() for node in column]
    return page_template(_TEMPLATE).render(
        thing=thing,
        svg=_drawing(around, thing),
        rows=rows,
        missing=[n.title for n in missing(graph, thing)],
    )


def _drawing(around: Lineage, thing: Thing) -> Markup:
    """Columns by generation; a node stands beside what it was made from."""
    columns = around.generations()
    places = _rows(around, columns)
    nodes = [
        Node(
            node.key,
            clipped_line(f"{'▸ ' if node.key == thing.key else ''}{node.title}", TITLE_CHARS),
            clipped_line(_detail(node), DETAIL_CHARS),
            x,
            places[node.key],
            node.found,
        )
        for x, column in enumerate(columns)
        for node in column
    ]
    edges = [Edge(parent, child) for parent, child in around.reduced_edges()]  # the table has all
    return lineage_graph("lineage", f"Lineage of {thing.title}", nodes, edges)


def _rows(around: Lineage, columns: list[list[Thing]]) -> dict[str, float]:
    """The row of each node: the mean of its parents', moved down where that is taken."""
    rows: dict[str, float] = {}
    for column in columns:
        wanted = {
            n.key: mean(rows[p.key] for p in parents) if (parents := around.parents(n.key)) else 0.0
            for n in column
        }
        free = -len(column) / 2
        for key in sorted(wanted, key=lambda k: (wanted[k], k)):
            rows[key] = free = max(free, wanted[key] - (len(column) - 1) / 2)
            free += 1.0
    top = min(rows.values())
    return {key: row - top for key, row in rows.items()}


def _detail(node: Thing) -> str:
    if not node.found:
        return "not on disk"
    return node.sha256[:HASH_CHARS] if node.sha256 else node.kind


def _row(around: Lineage, node: Thing) -> dict[str, object]:
    return {
        "title": node.title,
        "kind": node.kind,
        "sha": node.sha256 or "–",
        "where": node.where or "–",
        "found": node.found,
        "facts": [f"{name}: {value}" for name, value in node.facts.items()],
        "parents": [_named(p) for p in around.parents(node.key)],
        "children": [_named(c) for c in around.children(node.key)],
    }


def _named(node: Thing) -> str:
    return f"{node.title} {node.sha256[:HASH_CHARS]}" if node.sha256 else node.title
