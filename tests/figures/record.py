"""Where a benchmark or fault test leaves its figure, and how all of them are gathered."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.artifacts import write_json
from tests.figures.catalogue import FIGURES, Suite, figure

ROOT = Path("runs")


def _path(suite: Suite, name: str, root: Path) -> Path:
    return root / suite / "figures" / f"{name}.json"


def record(
    name: str,
    *,
    value: float | None,
    met: bool,
    note: str = "",
    seeds: Sequence[int] = (),
    details: Mapping[str, Any] | None = None,
    root: Path = ROOT,
) -> None:
    """Keep one measured figure; unit, comparison and target stand in the catalogue."""
    promised = figure(name)
    body = {
        "value": value,
        "unit": promised.unit,
        "against": promised.against,
        "target": promised.target,
        "met": met,
        "seeds": list(seeds),
        "note": note,
        **({"details": dict(details)} if details else {}),
    }
    write_json(_path(promised.suite, name, root), body)


def forget(suite: Suite, names: Sequence[str], root: Path = ROOT) -> None:
    """Take old figures away, so that a run that measures nothing cannot show them."""
    for name in names:
        _path(suite, name, root).unlink(missing_ok=True)


def gather(suite: Suite, root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Write and return `latest.json` of a suite; a figure nobody measured is not met."""
    figures = {}
    for promised in FIGURES:
        if promised.suite != suite:
            continue
        try:
            figures[promised.name] = json.loads(_path(suite, promised.name, root).read_bytes())
        except FileNotFoundError:
            figures[promised.name] = {
                "value": None,
                "unit": promised.unit,
                "against": promised.against,
                "target": promised.target,
                "met": False,
                "seeds": [],
                "note": "not measured",
            }
    write_json(root / suite / "latest.json", figures)
    return figures
