"""Size against fidelity: which files are worth having, and which one a wish asks for. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantize.errors import FrontierError
from tasks.artifacts.bootstrap import Interval

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Point:
    """One file that was made and measured."""

    name: str
    size_bytes: int
    bits_per_weight: float
    kld: Interval
    """Mean KL to F16 per token on held-out rollouts, nats."""
    accuracy: Interval | None
    """Greedy, on held-out problems; None where there were none to ask."""
    ships: bool | None
    """Whether the gate of its type passes; None where it could not be judged."""
    raised: tuple[tuple[str, str], ...] = ()
    """(tensor, type) of every tensor raised above the recipe."""


@dataclass(frozen=True)
class Wish:
    """What is asked for: exactly one of the three."""

    size_bytes: int | None = None
    accuracy: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        asked = [x for x in (self.size_bytes, self.accuracy, self.name) if x is not None]
        if len(asked) != 1:
            raise FrontierError(
                f"{len(asked)} wishes; give exactly one of --target-size, --target-accuracy, --type"
            )
        if self.accuracy is not None and not 0 < self.accuracy <= 1:
            raise FrontierError(
                f"--target-accuracy {self.accuracy:g}; expected a share above 0 and at most 1, "
                "as in 0.97"
            )


@dataclass(frozen=True)
class Choice:
    """The file picked and the reason in words."""

    point: Point
    why: str


def parse_size(text: str) -> int:
    """Bytes of `600KB`, `1.5 MiB`, `2GB` or `750000`; KB is 1,000 bytes and KiB 1,024.

    Raises:
        FrontierError: not a size above nought.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not float(match[1]) > 0:
        raise FrontierError(
            f"--target-size {text!r}; expected a number of bytes or a size such as 600KB, 1.5MiB"
        )
    return int(float(match[1]) * unit)


def frontier(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats: every smaller file is further from F16. By size.

    Raises:
        FrontierError: a KL that is not a number.
    """
    for point in points:
        if not math.isfinite(point.kld.value):
            raise FrontierError(
                f"{point.name} has a mean KL of {point.kld.value}; measure it again"
            )
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.size_bytes, p.kld.value, p.name)):
        if not best or point.kld.value < best[-1].kld.value:
            best.append(point)
    return tuple(best)


def pick(points: Sequence[Point], wish: Wish) -> Choice:
    """The file that fulfils the wish.

    Raises:
        FrontierError: none does; names the nearest and what to do.
    """
    if not points:
        raise FrontierError("no quantisation was made; give at least one of quantize.types")
    if wish.size_bytes is not None:
        return _by_size(points, wish.size_bytes)
    if wish.accuracy is not None:
        return _by_accuracy(points, wish.accuracy)
    return _by_name(points, wish.name or "")


def _by_size(points: Sequence[Point], limit: int) -> Choice:
    fitting = [p for p in points if p.size_bytes <= limit]
    if not fitting:
        smallest = min(points, key=lambda p: p.size_bytes)
        raise FrontierError(
            f"no file has at most {limit:,} bytes; the smallest is {smallest.name} with "
            f"{smallest.size_bytes:,}. Ask for more, or train a smaller model"
        )
    best = min(fitting, key=lambda p: (p.kld.value, p.size_bytes))
    why = (
        f"of {len(fitting)} files with at most {limit:,} bytes it lies nearest to F16: mean KL "
        f"{best.kld.value:.3g} nats per token"
    )
    beyond = [p for p in points if p.size_bytes > limit and p.kld.value < best.kld.value]
    if beyond:
        following = min(beyond, key=lambda p: p.size_bytes)
        why += (
            f"; the next better, {following.name}, needs {following.size_bytes:,} bytes "
            f"(KL {following.kld.value:.3g})"
        )
    return Choice(best, why)


def _by_accuracy(points: Sequence[Point], target: float) -> Choice:
    measured = [(p, p.accuracy) for p in points if p.accuracy is not None]
    if not measured:
        raise FrontierError(
            "accuracy was not measured, for there were no held-out problems; give a run's folder, "
            "or --data with a folder that holds heldout.jsonl"
        )
    enough = [(p, a) for p, a in measured if a.low >= target]
    if enough:
        best, accuracy = min(enough, key=lambda pair: (pair[0].size_bytes, pair[0].kld.value))
        larger = len(enough) - 1
        return Choice(
            best,
            f"the smallest whose whole 95 % interval reaches {target:g}: accuracy "
            f"{accuracy.value:.4f} ({accuracy.low:.4f} to {accuracy.high:.4f}); {larger} larger "
            f"file{'' if larger == 1 else 's'} would do too",
        )
    best, accuracy = max(measured, key=lambda pair: pair[1].low)
    advice = (
        "its value reaches it but its interval does not: ask more problems (--problems), or for "
        "less"
        if accuracy.value >= target
        else "no file does; train a better policy or ask for less"
    )
    raise FrontierError(
        f"no file has an accuracy of at least {target:g} beyond chance; the best is {best.name} "
        f"with {accuracy.value:.4f} ({accuracy.low:.4f} to {accuracy.high:.4f}): {advice}"
    )


def _by_name(points: Sequence[Point], name: str) -> Choice:
    found = next((p for p in points if p.name == name), None)
    if found is None:
        raise FrontierError(
            f"--type {name}: not among the files made: {', '.join(p.name for p in points)}"
        )
    return Choice(found, f"asked for by name; mean KL {found.kld.value:.3g} nats per token")


def as_json(points: Sequence[Point], choice: Choice | None = None) -> dict[str, Any]:
    """`frontier.json`."""
    kept = {p.name for p in frontier(points)}
    return {
        "points": [_point_json(p, p.name in kept) for p in points],
        "picked": None if choice is None else {"name": choice.point.name, "why": choice.why},
    }


def _point_json(point: Point, on_frontier: bool) -> dict[str, Any]:
    accuracy = point.accuracy
    return {
        "name": point.name,
        "size_bytes": point.size_bytes,
        "bits_per_weight": point.bits_per_weight,
        "kld_mean": point.kld.value,
        "kld_mean_ci95": [point.kld.low, point.kld.high],
        "accuracy": None if accuracy is None else accuracy.value,
        "accuracy_ci95": None if accuracy is None else [accuracy.low, accuracy.high],
        "ships": point.ships,
        "on_frontier": on_frontier,
        "raised": dict(point.raised),
    }


def point_of(name: str, facts: Mapping[str, Any]) -> Point:
    """A point from an entry of `parity.json`.

    Raises:
        FrontierError: the entry lacks a figure.
    """
    try:
        accuracy = facts.get("accuracy")
        ships = facts.get("ships")
        tensors = (facts.get("repaired") or {}).get("tensors") or {}
        return Point(
            name=name,
            size_bytes=int(facts["size_bytes"]),
            bits_per_weight=float(facts["bits_per_weight"]),
            kld=Interval(float(facts["kld_mean"]), *map(float, facts["kld_mean_ci95"])),
            accuracy=None
            if accuracy is None
            else Interval(float(accuracy), *map(float, facts["accuracy_ci95"])),
            ships=ships if isinstance(ships, bool) else None,
            raised=tuple((t, kind["to"]) for t, kind in sorted(tensors.items())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FrontierError(
            f"parity.json says too little about {name} ({error!r}); quantise again"
        ) from error
