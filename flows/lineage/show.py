"""The lineage of one thing as text and as JSON."""

from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.tree import Tree

from flows.lineage.graph import Lineage, Node
from flows.report.text import clipped_line, visible

HASH_CHARS = 12
SHOWN_CHARS = 120
MAX_BRANCH = 12
"""Children shown under one node; how many more there are is said."""


def line(node: Node) -> str:
    """One node in one line of markup; what came from outside is escaped."""
    sha = f" [cyan]{node.sha256[:HASH_CHARS]}[/]" if node.sha256 else ""
    title = escape(clipped_line(visible(node.title), SHOWN_CHARS))
    alias = f" [green]{escape(node.facts['alias'])}[/]" if "alias" in node.facts else ""
    if not node.found:
        known = node.facts.get("mlflow run")
        gone = f"gone from disk; MLflow run {known}" if known else "can no longer be found"
        return f"[yellow]{title}[/]{sha} [bold red]{escape(gone)}[/]"
    where = (
        f" [dim]{escape(clipped_line(visible(node.where), SHOWN_CHARS))}[/]" if node.where else ""
    )
    return f"[bold]{title}[/]{sha}{alias}{where}"


def as_text(graph: Lineage, node: Node) -> Group:
    """What it is, what it was made from, what was made from it, what is missing."""
    facts = Tree(line(node))
    for name, value in node.facts.items():
        facts.add(f"[dim]{escape(name)}[/] {escape(clipped_line(visible(value), SHOWN_CHARS))}")
    up = Tree("made from" if graph.parents(node.key) else "made from: nothing that is recorded")
    _grow(up, graph, node, upwards=True, shown=set())
    down = Tree("went into" if graph.children(node.key) else "went into: nothing yet")
    _grow(down, graph, node, upwards=False, shown=set())
    return Group(facts, up, down, *_missing(graph, node))


def missing(graph: Lineage, node: Node) -> list[Node]:
    """What on the way can no longer be found on disk."""
    around = [node, *graph.ancestors(node.key), *graph.descendants(node.key)]
    return [n for n in around if not n.found]


def _missing(graph: Lineage, node: Node) -> list[str]:
    gone = missing(graph, node)
    if not gone:
        return []
    names = ", ".join(f"{escape(n.title)} {(n.sha256 or n.key)[:HASH_CHARS]}" for n in gone)
    return [f"[yellow]not on this disk any more:[/] {names}"]


def _grow(tree: Tree, graph: Lineage, node: Node, *, upwards: bool, shown: set[str]) -> None:
    """Branches, each node in full once; later it is only named."""
    neighbours = graph.parents(node.key) if upwards else graph.children(node.key)
    for count, other in enumerate(neighbours):
        if count == MAX_BRANCH:
            tree.add(f"[dim]and {len(neighbours) - count} more: --json has all[/]")
            return
        if other.key in shown:
            tree.add(f"{line(other)} [dim](above)[/]")
            continue
        shown.add(other.key)
        _grow(tree.add(line(other)), graph, other, upwards=upwards, shown=shown)


def as_json(graph: Lineage, node: Node) -> dict[str, Any]:
    """The same for programs: the node, every node around it, and the edges parent → child."""
    around = graph.around(node.key)
    return {
        "asked": node.key,
        "nodes": [_body(n) for n in around.nodes()],
        "edges": [list(edge) for edge in around.edges()],
        "ancestors": [n.key for n in graph.ancestors(node.key)],
        "descendants": [n.key for n in graph.descendants(node.key)],
        "missing": [n.key for n in missing(graph, node)],
    }


def _body(node: Node) -> dict[str, Any]:
    return {
        "key": node.key,
        "kind": node.kind,
        "title": node.title,
        "sha256": node.sha256,
        "where": node.where,
        "found": node.found,
        "facts": dict(node.facts),
    }
