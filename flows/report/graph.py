"""The lineage graph as inline SVG: boxes on a grid, an arrow for every input."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flows.report.charts import svg
from flows.report.text import visible

_BOX_W, _BOX_H = 158.0, 60.0
_STEP_X, _STEP_Y = 200.0, 86.0
_MARGIN_X, _MARGIN_Y = 8.0, 20.0
_CORNER = 10.0


@dataclass(frozen=True)
class Node:
    """A box at column, row (may be fractional)."""

    key: str
    title: str
    detail: str
    column: float
    row: float
    present: bool = True

    @property
    def left(self) -> float:
        """x of the left side."""
        return _MARGIN_X + self.column * _STEP_X

    @property
    def top(self) -> float:
        """y of the upper side."""
        return _MARGIN_Y + self.row * _STEP_Y


@dataclass(frozen=True)
class Edge:
    """`parent` was read to make `child`; `lane` is the row it is led along, None goes directly."""

    parent: str
    child: str
    lane: float | None = None


def lineage_graph(key: str, title: str, nodes: Sequence[Node], edges: Sequence[Edge]) -> Markup:
    """The whole drawing."""
    by_key = {node.key: node for node in nodes}
    width = max(n.left for n in nodes) + _BOX_W + _MARGIN_X
    height = max(n.top for n in nodes) + _BOX_H + 8
    arrow = Markup(
        '<defs><marker id="{}-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="arrowhead" d="M0 0L8 4L0 8z"/></marker></defs>'
    ).format(key)
    template = Markup('<path class="edge" d="{}" marker-end="url(#{}-arrow)"/>')
    body = [arrow]
    body += [template.format(_route(by_key[e.parent], by_key[e.child], e.lane), key) for e in edges]
    body += [_box(node) for node in nodes]
    words = " ".join(f"{by_key[e.parent].title} feeds {by_key[e.child].title}." for e in edges)
    return svg(key, title, words, Markup("").join(body), width, height, css="lineage")


def _box(node: Node) -> Markup:
    return Markup(
        '<g class="node{absent}"><rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8"/>'
        '<text class="node-title" x="{tx:g}" y="{ty:g}">{title}</text>'
        '<text class="node-detail" x="{tx:g}" y="{dy:g}">{detail}</text></g>'
    ).format(
        absent="" if node.present else " absent",
        x=node.left,
        y=node.top,
        w=_BOX_W,
        h=_BOX_H,
        tx=node.left + 12,
        ty=node.top + 25,
        dy=node.top + 45,
        title=visible(node.title),
        detail=visible(node.detail),
    )


def _route(parent: Node, child: Node, lane: float | None) -> str:
    """Path from the right side of `parent` to the left side of `child`, or round along a lane."""
    x0, y0 = parent.left + _BOX_W, parent.top + _BOX_H / 2
    x1, y1 = child.left - 2, child.top + _BOX_H / 2
    if lane is None:
        if y0 == y1:
            return f"M{x0:g} {y0:g}H{x1:g}"
        bend = (x1 - x0) / 2
        return f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"
    along = _MARGIN_Y + lane * _STEP_Y + (_BOX_H / 2 if lane == child.row else 0)
    start, end = parent.left + _BOX_W / 2, child.left + _BOX_W / 2
    down = along > parent.top
    leave = parent.top + (_BOX_H if down else 0)
    turn = along - _CORNER if down else along + _CORNER
    path = f"M{start:g} {leave:g}V{turn:g}Q{start:g} {along:g} {start + _CORNER:g} {along:g}"
    if child.top <= along <= child.top + _BOX_H:
        return f"{path}H{x1:g}"
    corner = f"Q{end:g} {along:g} {end:g} {along + _CORNER:g}"
    return f"{path}H{end - _CORNER:g}{corner}V{child.top - 2:g}"
