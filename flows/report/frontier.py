"""The report's picture of size against fidelity: one dot for each file that was measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from flows.report.charts import nice_ticks, svg
from flows.report.data import RunFiles, dig, quantised, rows
from flows.report.text import finite, number, size, visible

EXPLORED = ("quantise", "frontier.json")
"""Where `rl-pipeline quantise` leaves what it measured, below the run's folder."""
_WIDTH, _HEIGHT = 760.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 110.0, 16.0, 34.0


@dataclass(frozen=True)
class Dot:
    """One file."""

    name: str
    size_bytes: float
    kld: float
    """Above nought."""
    ships: bool | None
    named: bool = True
    """Whether its name is written beside it; all are told on pointing."""


def frontier_section(files: RunFiles) -> dict[str, Any]:
    """The chart and, where `rl-pipeline quantise` was run, what it picked and why."""
    explored = _explored(files)
    picked, why = dig(explored, "picked", "name"), dig(explored, "picked", "why")
    made = [{"name": n, **facts} for n, facts in quantised(files).items() if n != "F16"]
    tried = [
        replace(dot, named="+" not in dot.name or dot.name == picked)
        for dot in _dots(rows(explored, "points"))
    ]
    unique = list({dot.name: dot for dot in [*tried, *_dots(made)]}.values())
    return {
        "svg": chart(unique),
        "picked": str(picked) if picked else "",
        "why": str(why) if why else "",
    }


def _explored(files: RunFiles) -> dict[str, Any]:
    path = files.run_dir.joinpath(*EXPLORED)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        files.problems.append(f"{'/'.join(EXPLORED)} could not be read: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def _dots(entries: Sequence[dict[str, Any]]) -> list[Dot]:
    """Entries whose size and KL are known; a KL of nought has no place on a logarithm."""
    found = []
    for entry in entries:
        width, kld = finite(entry.get("size_bytes")), finite(entry.get("kld_mean"))
        ships = entry.get("ships")
        if width is not None and kld is not None and kld > 0:
            known = ships if isinstance(ships, bool) else None
            found.append(Dot(str(entry.get("name")), width, kld, known))
    return found


def best(dots: Sequence[Dot]) -> list[Dot]:
    """Those that no smaller file beats, by size."""
    kept: list[Dot] = []
    for dot in sorted(dots, key=lambda d: (d.size_bytes, d.kld)):
        if not kept or dot.kld < kept[-1].kld:
            kept.append(dot)
    return kept


def chart(dots: Sequence[Dot]) -> Markup:
    """Size to the right, KL upwards on a logarithm; nothing for fewer than two files."""
    if len(dots) < 2:
        return Markup("")
    x_ticks = nice_ticks(min(d.size_bytes for d in dots), max(d.size_bytes for d in dots))
    low = math.floor(math.log10(min(d.kld for d in dots)))
    high = max(low + 1, math.ceil(math.log10(max(d.kld for d in dots))))
    place = _Place(x_ticks[0], x_ticks[-1], low, high)
    line = best(dots)
    path = "".join(
        f"{'ML'[i > 0]}{place.x(d.size_bytes):g} {place.y(d.kld):g}" for i, d in enumerate(line)
    )
    body = [
        _grid(place, x_ticks, range(low, high + 1)),
        Markup('<path class="line thin s0" d="{}"/>').format(path),
        *(_dot(place, d) for d in sorted(dots, key=lambda d: d.size_bytes)),
    ]
    words = " ".join(f"{d.name}: {size(d.size_bytes)}, KL {number(d.kld)}." for d in dots)
    title = "File size against mean KL to F16"
    return svg("frontier", title, words, Markup("").join(body), _WIDTH, _HEIGHT)


class _Place:
    """Data to drawing coordinates."""

    def __init__(self, x_low: float, x_high: float, low: int, high: int) -> None:
        self._x_low, self._x_span = x_low, x_high - x_low
        self._low, self._span = low, high - low

    def x(self, size_bytes: float) -> float:
        """From the left edge."""
        room = _WIDTH - _LEFT - _RIGHT
        return round(_LEFT + room * (size_bytes - self._x_low) / self._x_span, 1)

    def y(self, kld: float) -> float:
        """From the top; the largest KL is highest."""
        room = _HEIGHT - _TOP - _BOTTOM
        return round(_HEIGHT - _BOTTOM - room * (math.log10(kld) - self._low) / self._span, 1)


def _grid(place: _Place, x_ticks: Sequence[float], decades: Sequence[int]) -> Markup:
    across = Markup(
        '<line class="grid" x1="{l}" x2="{r}" y1="{y}" y2="{y}"/>'
        '<text class="tick" x="{t}" y="{ty}" text-anchor="end">{label}</text>'
    )
    down = Markup('<text class="tick" x="{x}" y="{y}" text-anchor="middle">{label}</text>')
    lines = [
        across.format(
            l=_LEFT,
            r=_WIDTH - _RIGHT,
            y=place.y(10.0**decade),
            t=_LEFT - 6,
            ty=place.y(10.0**decade) + 3.5,
            label=number(10.0**decade, 1),
        )
        for decade in decades
    ]
    labels = [down.format(x=place.x(t), y=_HEIGHT - 12, label=size(t)) for t in x_ticks]
    return Markup("").join([*lines, *labels])


def _dot(place: _Place, dot: Dot) -> Markup:
    """Blue where its gate passes or was not asked, red where it fails."""
    colour = "s1" if dot.ships is False else "s0"
    x, y = place.x(dot.size_bytes), place.y(dot.kld)
    gate = {True: "its gate passes", False: "its gate fails", None: "not judged"}[dot.ships]
    words = visible(f"{dot.name}: {size(dot.size_bytes)}, mean KL {number(dot.kld)}, {gate}")
    mark = Markup(
        '<circle class="dot {}" cx="{}" cy="{}" r="4.5"><title>{}</title></circle>'
    ).format(colour, x, y, words)
    if not dot.named:
        return mark
    label = Markup('<text class="tick" x="{}" y="{}">{}</text>')
    return mark + label.format(x + 8, y - 4, visible(dot.name))
