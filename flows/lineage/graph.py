"""The lineage graph: what was made from what, walked both ways.

A node is a thing under its content hash where it has one. An edge goes from what was read to what
was made of it. A thing that something was made from and that is nowhere to be found is a node too,
with `found` False: what is missing is named, not left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import networkx as nx

MIN_PREFIX = 6


class LineageQueryError(LookupError):
    """What was asked for names nothing, or more than one thing."""


@dataclass(frozen=True)
class Node:
    """One thing: `key` is unique, `kind` what it is, `where` a path or address."""

    key: str
    kind: str
    title: str
    sha256: str | None = None
    where: str | None = None
    found: bool = True
    facts: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Other words it is asked for by."""


class Lineage:
    """Nodes by key, and which was made from which."""

    def __init__(self) -> None:
        self._graph: nx.DiGraph[str] = nx.DiGraph()
        self._nodes: dict[str, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def node(self, key: str) -> Node:
        """The node of this key."""
        return self._nodes[key]

    def add(self, node: Node) -> None:
        """Add a node; one known already gains names and facts, and is found if either is."""
        self._graph.add_node(node.key)
        known = self._nodes.get(node.key)
        if known is None:
            self._nodes[node.key] = node
            return
        best, other = (node, known) if node.found and not known.found else (known, node)
        self._nodes[node.key] = replace(
            best,
            where=best.where or other.where,
            facts={**other.facts, **best.facts},
            names=tuple(dict.fromkeys((*known.names, *node.names))),
        )

    def extend(
        self, key: str, *, facts: Mapping[str, str] | None = None, names: Iterable[str] = ()
    ) -> None:
        """Give a node further facts and names."""
        node = self._nodes[key]
        self._nodes[key] = replace(
            node,
            facts={**node.facts, **(facts or {})},
            names=tuple(dict.fromkeys((*node.names, *names))),
        )

    def link(self, parent: str, child: str) -> None:
        """`child` was made from `parent`; both must have been added."""
        missing = [key for key in (parent, child) if key not in self._nodes]
        if missing:
            raise KeyError(f"lineage has no node {', '.join(missing)}")
        if parent != child:
            self._graph.add_edge(parent, child)

    def parents(self, key: str) -> list[Node]:
        """What it was made from, directly."""
        return self._sorted(self._graph.predecessors(key))

    def children(self, key: str) -> list[Node]:
        """What was made from it, directly."""
        return self._sorted(self._graph.successors(key))

    def ancestors(self, key: str) -> list[Node]:
        """All it was made from."""
        return self._sorted(nx.ancestors(self._graph, key))

    def descendants(self, key: str) -> list[Node]:
        """All that was made from it."""
        return self._sorted(nx.descendants(self._graph, key))

    def around(self, key: str) -> "Lineage":
        """The part that leads to `key` or from it."""
        part = Lineage()
        keys = {key, *nx.ancestors(self._graph, key), *nx.descendants(self._graph, key)}
        for name in sorted(keys):
            part.add(self._nodes[name])
        for parent, child in self._graph.subgraph(keys).edges:
            part.link(parent, child)
        return part

    def edges(self) -> list[tuple[str, str]]:
        """Every edge, sorted."""
        return sorted(self._graph.edges)

    def reduced_edges(self) -> list[tuple[str, str]]:
        """Edges no longer way already implies: the fewest that show the same order."""
        return sorted(nx.transitive_reduction(self._graph).edges)

    def nodes(self) -> list[Node]:
        """Every node, sorted by key."""
        return self._sorted(self._nodes)

    def generations(self) -> list[list[Node]]:
        """Nodes in columns: each right of everything it was made from."""
        return [self._sorted(keys) for keys in nx.topological_generations(self._graph)]

    def find(self, query: str) -> Node:
        """The node a person means: a key, a name, a hash or its first characters.

        Raises:
            LineageQueryError: nothing or several things; says which.
        """
        exact = [n for n in self._nodes.values() if query in (n.key, n.sha256, *n.names)]
        if len(exact) == 1:
            return exact[0]
        hits = exact or self._by_prefix(query)
        if len(hits) == 1:
            return hits[0]
        if not hits:
            raise LineageQueryError(
                f"nothing here is called {query!r}; give a device, a bundle or run folder, a model "
                f"version (calculator/3, champion), a sha256 ({MIN_PREFIX} characters or more), or "
                "the id of a data row"
            )
        listed = "\n".join(f"  {n.key}  {n.title}" for n in self._sorted(h.key for h in hits))
        raise LineageQueryError(f"{query!r} can mean {len(hits)} things; give one of\n{listed}")

    def _by_prefix(self, query: str) -> list[Node]:
        if len(query) < MIN_PREFIX:
            return []
        return [n for n in self._nodes.values() if n.sha256 and n.sha256.startswith(query.lower())]

    def _sorted(self, keys: Iterable[str]) -> list[Node]:
        return [self._nodes[key] for key in sorted(keys)]
