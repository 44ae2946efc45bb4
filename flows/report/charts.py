"""Inline SVG charts of the report: lines, bars with intervals, stacked bars.

Pure: numbers in, markup out; no script, no font and no file from outside. Colours are CSS classes
of the page, so that light and dark follow the reader. A value that is unknown leaves a gap, it is
never drawn as 0. Every chart has a `<title>` and a `<desc>` that say in words what it shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flows.report.text import number, visible

Point = tuple[float, float | None]

_WIDTH, _HEIGHT = 380.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 14.0, 12.0, 28.0
_HOVER_STRIPS = 60
_MOST_POINTS = 500
COLOURS = 10
"""How many `p…` colours the page has."""


@dataclass(frozen=True)
class Series:
    """One named line."""

    label: str
    points: tuple[Point, ...]
    """(step, value); None where the value is unknown."""

    @property
    def known(self) -> list[tuple[float, float]]:
        """Points whose value is known."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Bar:
    """A share in [0, 1] with its interval; `value` None is drawn as "unknown"."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Part:
    """One segment of a stacked bar; `colour` is the number of a `p…` class of the page."""

    label: str
    value: float
    colour: int


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """About `wanted` round numbers (1, 2, 2.5 or 5 × 10ⁿ apart) that cover [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` points: means of equal runs of steps; an all-unknown run stays unknown."""
    run = math.ceil(len(points) / most) if points else 1
    if run == 1:
        return list(points)
    means: list[Point] = []
    for start in range(0, len(points), run):
        chunk = points[start : start + run]
        known = [y for _, y in chunk if y is not None and math.isfinite(y)]
        x = sum(x for x, _ in chunk) / len(chunk)
        means.append((x, sum(known) / len(known) if known else None))
    return means


def moving_mean(points: Sequence[Point], width: int) -> list[Point]:
    """Centred mean of the known values within `width` points; gaps stay gaps."""
    half = width // 2
    means: list[Point] = []
    for i, (x, y) in enumerate(points):
        near = [v for _, v in points[max(0, i - half) : i + half + 1] if v is not None]
        means.append((x, sum(near) / len(near) if y is not None and near else None))
    return means


def line_chart(
    key: str, title: str, series: Sequence[Series], *, smooth: bool = False, unit: str = "step"
) -> Markup:
    """Lines over steps. `smooth` draws every step thin and a moving mean thick; `unit` names what
    is counted from left to right."""
    drawn = [Series(s.label, tuple(thinned(s.points))) for s in series]
    known = [point for s in drawn for point in s.known]
    if not known:
        return Markup("")
    xs = sorted({x for x, _ in known})
    ticks = nice_ticks(min(y for _, y in known), max(y for _, y in known))
    scale = _Scale(xs[0], xs[-1], ticks[0], ticks[-1])
    body = [_grid(scale, ticks), _x_labels(scale, unit)]
    for index, line in enumerate(drawn):
        points = [(x, y if y is not None and math.isfinite(y) else None) for x, y in line.points]
        width = max(3, len(points) // 12)
        if smooth and len(points) > 12:
            body.append(_path(scale, points, f"line thin s{index}"))
            points = moving_mean(points, width)
        body.append(_path(scale, points, f"line s{index}"))
        body.append(_last_dot(scale, [(x, y) for x, y in points if y is not None], index))
    body.append(_hover(scale, drawn, unit))
    return svg(key, title, _describe(drawn), Markup("").join(body), _WIDTH, _HEIGHT)


class _Scale:
    """Data to drawing coordinates."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self.x_low, self.x_high = x_low, x_high
        self._y_low, self._y_span = y_low, (y_high - y_low) or 1.0

    def x(self, value: float) -> float:
        """Left edge to right edge; a single step stands in the middle."""
        room = _WIDTH - _LEFT - _RIGHT
        if self.x_high == self.x_low:
            return round(_LEFT + room / 2, 1)
        return round(_LEFT + room * (value - self.x_low) / (self.x_high - self.x_low), 1)

    def y(self, value: float) -> float:
        """Bottom to top."""
        room = _HEIGHT - _TOP - _BOTTOM
        return round(_HEIGHT - _BOTTOM - room * (value - self._y_low) / self._y_span, 1)


def _grid(scale: _Scale, ticks: Sequence[float]) -> Markup:
    template = (
        '<line class="grid" x1="{l}" x2="{r}" y1="{y}" y2="{y}"/>'
        '<text class="tick" x="{t}" y="{ty}" text-anchor="end">{label}</text>'
    )
    return Markup("").join(
        Markup(template).format(
            l=_LEFT,
            r=_WIDTH - _RIGHT,
            y=scale.y(tick),
            t=_LEFT - 6,
            ty=scale.y(tick) + 3.5,
            label=number(tick, 4),
        )
        for tick in ticks
    )


def _x_labels(scale: _Scale, unit: str) -> Markup:
    template = Markup('<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>')
    y = _HEIGHT - 10
    if scale.x_low == scale.x_high:
        label = f"{unit} {number(scale.x_low, 6)}"
        return template.format(x=scale.x(scale.x_low), y=y, anchor="middle", label=label)
    ends = [
        template.format(x=_LEFT, y=y, anchor="start", label=f"{unit} {number(scale.x_low, 6)}"),
        template.format(x=_WIDTH - _RIGHT, y=y, anchor="end", label=number(scale.x_high, 6)),
    ]
    return Markup("").join(ends)


def _path(scale: _Scale, points: Sequence[Point], css: str) -> Markup:
    """One path with a move after every gap; a point alone becomes a short dash that shows."""
    commands, pen = [], "M"
    for i, (x, y) in enumerate(points):
        if y is None:
            pen = "M"
            continue
        commands.append(f"{pen}{scale.x(x):g} {scale.y(y):g}")
        alone = pen == "M" and (i + 1 == len(points) or points[i + 1][1] is None)
        if alone:
            commands.append("h0.01")
        pen = "L"
    return Markup('<path class="{}" d="{}"/>').format(css, " ".join(commands))


def _last_dot(scale: _Scale, known: Sequence[tuple[float, float]], index: int) -> Markup:
    if not known:
        return Markup("")
    x, y = known[-1]
    return Markup('<circle class="dot s{}" cx="{}" cy="{}" r="2.6"/>').format(
        index, scale.x(x), scale.y(y)
    )


def _hover(scale: _Scale, series: Sequence[Series], unit: str) -> Markup:
    """Invisible strips whose `<title>` tells the values of a step."""
    values: dict[float, list[str]] = {}
    for line in series:
        for x, y in line.known:
            values.setdefault(x, []).append(f"{line.label} {number(y)}")
    xs = sorted(values)
    every = math.ceil(len(xs) / _HOVER_STRIPS)
    xs = xs[::every]
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(xs))
    template = Markup(
        '<rect class="hover" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
    )
    return Markup("").join(
        template.format(
            round(scale.x(x) - width / 2, 1),
            _TOP,
            round(width, 1),
            _HEIGHT - _TOP - _BOTTOM,
            visible(f"{unit} {number(x, 6)}: {', '.join(values[x])}"),
        )
        for x in xs
    )


def _describe(series: Sequence[Series]) -> str:
    sentences = []
    for line in series:
        if not line.known:
            sentences.append(f"{line.label}: not measured.")
            continue
        ys = [y for _, y in line.known]
        sentences.append(
            f"{line.label}: first {number(ys[0])}, last {number(ys[-1])}, "
            f"lowest {number(min(ys))}, highest {number(max(ys))}."
        )
    return " ".join(sentences)


def interval_bars(key: str, title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> Markup:
    """Groups of horizontal bars on 0 … 1 with whiskers for their intervals."""
    if not groups:
        return Markup("")
    left, width, bar, gap = 78.0, 560.0, 17.0, 16.0
    room = width - left - 60
    body: list[Markup] = []
    height = 12 + sum(len(bars) * (bar + 3) + gap for _, bars in groups) + 20
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x = round(left + room * tick, 1)
        body.append(
            Markup(
                '<line class="grid" x1="{x}" x2="{x}" y1="6" y2="{b}"/>'
                '<text class="tick" x="{x}" y="{t}" text-anchor="middle">{label}</text>'
            ).format(x=x, b=height - 20, t=height - 5, label=f"{tick * 100:.0f} %")
        )
    y, words = 12.0, []
    for name, bars in groups:
        middle = y + len(bars) * (bar + 3) / 2
        body.append(
            Markup('<text class="name" x="{}" y="{}" text-anchor="end">{}</text>').format(
                left - 10, round(middle + 3, 1), visible(name)
            )
        )
        for index, item in enumerate(bars):
            body.append(_interval_bar(item, index, left, y, room, bar))
            words.append(f"{name}, {item.label}: {_bar_words(item)}.")
            y += bar + 3
        y += gap
    return svg(key, title, " ".join(words), Markup("").join(body), width, height)


def _bar_words(item: Bar) -> str:
    if item.value is None:
        return "not measured"
    interval = ""
    if item.low is not None and item.high is not None:
        interval = f" (95 % interval {item.low * 100:.1f} to {item.high * 100:.1f} %)"
    return f"{item.value * 100:.1f} %{interval}"


def _interval_bar(
    item: Bar, index: int, left: float, y: float, room: float, height: float
) -> Markup:
    middle = y + height / 2
    if item.value is None:
        return Markup('<text class="tick" x="{}" y="{}">{}: not measured</text>').format(
            left + 4, middle + 4, item.label
        )
    end = left + room * min(1.0, max(0.0, item.value))
    parts = [
        Markup(
            '<rect class="bar b{}" x="{}" y="{}" width="{}" height="{}" rx="2">'
            "<title>{}: {}</title></rect>"
        ).format(
            index, left, y, round(end - left, 1), height, visible(item.label), _bar_words(item)
        )
    ]
    label_x = end
    if item.low is not None and item.high is not None:
        low, high = left + room * item.low, left + room * item.high
        label_x = max(end, high)
        parts.append(
            Markup('<path class="whisker" d="M{a} {m}H{b}M{a} {t}V{u}M{b} {t}V{u}"/>').format(
                a=round(low, 1), b=round(high, 1), m=middle, t=middle - 3.5, u=middle + 3.5
            )
        )
    parts.append(
        Markup('<text class="value" x="{}" y="{}">{} %</text>').format(
            round(label_x + 7, 1), middle + 4, f"{item.value * 100:.1f}"
        )
    )
    return Markup("").join(parts)


def stacked_bar(key: str, title: str, parts: Sequence[Part], unit: str) -> Markup:
    """One horizontal bar whose segments are shares of the sum; the page's legend names them."""
    total = sum(part.value for part in parts)
    if total <= 0:
        return Markup("")
    width, height, x = 1000.0, 34.0, 0.0
    body, words = [], []
    for part in parts:
        share = part.value / total
        size = width * share
        text = f"{part.label}: {number(part.value)} {unit} ({share * 100:.1f} %)"
        words.append(text + ".")
        body.append(
            Markup(
                '<rect class="seg p{}" x="{}" y="0" width="{}" height="{}"><title>{}</title></rect>'
            ).format(part.colour, round(x, 2), round(max(size, 0), 2), height, visible(text))
        )
        x += size
    return svg(
        key, title, " ".join(words), Markup("").join(body), width, height, css="stack", stretch=True
    )


def svg(
    key: str,
    title: str,
    desc: str,
    body: Markup,
    width: float,
    height: float,
    css: str = "chart",
    *,
    stretch: bool = False,
) -> Markup:
    """A drawing with its name and its content in words; `stretch` fills its box, text-free."""
    return Markup(
        '<svg class="{css}" viewBox="0 0 {w} {h}" role="img" aria-labelledby="{k}-t {k}-d"{fit}>'
        '<title id="{k}-t">{title}</title><desc id="{k}-d">{desc}</desc>{body}</svg>'
    ).format(
        css=css,
        w=f"{width:g}",
        h=f"{height:g}",
        fit=Markup(' preserveAspectRatio="none"') if stretch else "",
        k=key,
        title=visible(title),
        desc=visible(desc),
        body=body,
    )
