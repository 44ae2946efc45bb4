"""The frontier as a picture that stands alone: PNG for a message, SVG for a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantize.frontier import Point, frontier
from tasks.artifacts import write_atomic

KL_FLOOR = 1e-9
"""Below it a point is drawn at the edge: a logarithm has no place for 0."""


def plot(points: Sequence[Point], picked: Point | None, folder: Path) -> tuple[Path, Path]:
    """Write `frontier.png` and `frontier.svg`; returns their paths."""
    from io import BytesIO

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    with_accuracy = [p for p in points if p.accuracy is not None]
    panels = figure.subplots(2 if with_accuracy else 1, 1, sharex=True, squeeze=False)[:, 0]
    _draw_kld(panels[0], points, picked)
    if with_accuracy:
        _draw_accuracy(panels[1], with_accuracy, picked)
    panels[-1].set_xlabel("file size, bytes")
    panels[-1].xaxis.set_major_formatter(lambda x, _: _size(x))
    written = []
    for kind in ("png", "svg"):
        buffer = BytesIO()
        # no date: the same points give the same bytes
        metadata = {"Date": None} if kind == "svg" else {}
        with rc_context({"svg.hashsalt": "frontier"}):
            figure.savefig(buffer, format=kind, dpi=140, metadata=metadata)
        written.append(write_atomic(folder / f"frontier.{kind}", buffer.getvalue()))
    return written[0], written[1]


def _draw_kld(axes: Any, points: Sequence[Point], picked: Point | None) -> None:
    best = frontier(points)
    axes.set_yscale("log")
    axes.plot(
        [p.size_bytes for p in best],
        [_kld(p) for p in best],
        color="#7a8494",
        linewidth=1,
        zorder=1,
    )
    on_it = {p.name for p in best}
    for point in points:
        _dot(axes, point, _kld(point), point.name in on_it, point == picked)
    axes.margins(x=0.1, y=0.12)  # room for the names
    axes.set_ylabel("mean KL to F16, nats per token")
    axes.set_title("Size against fidelity; filled: nothing smaller lies nearer to F16")
    axes.grid(alpha=0.25)


def _draw_accuracy(axes: Any, points: Sequence[Point], picked: Point | None) -> None:
    for point in points:
        assert point.accuracy is not None
        value, low, high = point.accuracy
        axes.vlines(point.size_bytes, low, high, color="#7a8494", linewidth=1, zorder=1)
        _dot(axes, point, value, point.ships is not False, point == picked, named=False)
    axes.set_ylabel("greedy accuracy, 95 % interval")
    axes.set_title("Filled: its gate passes", fontsize=9)
    axes.grid(alpha=0.25)


def _dot(
    axes: Any, point: Point, y: float, filled: bool, picked: bool, *, named: bool = True
) -> None:
    colour = "#c2410c" if picked else "#2563eb"
    axes.scatter(
        [point.size_bytes],
        [y],
        s=70 if picked else 34,
        facecolors=colour if filled else "white",
        edgecolors=colour,
        zorder=2,
    )
    if named and ("+" not in point.name or picked):
        axes.annotate(
            point.name + (" (picked)" if picked else ""),
            (point.size_bytes, y),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=9,
            color=colour if picked else "#111827",
        )


def _kld(point: Point) -> float:
    return max(point.kld.value, KL_FLOOR)


def _size(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} B"
