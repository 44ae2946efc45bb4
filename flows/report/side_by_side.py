"""F16 and quantised files side by side: the section of the report, and the page of its own.

What a model wrote is hostile: it goes through the template's escaping and `visible`, tokens too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.report.charts import Series, line_chart
from flows.report.data import QUANT_ORDER, RunFiles, dig, rows, table
from flows.report.pages import page_template
from flows.report.text import clipped, finite, interval, number, percent
from flows.report.transcripts import MOST_MESSAGES, answer_part, message
from tasks.artifacts import write_atomic

_TEMPLATE = Path(__file__).with_name("parity_template.html.j2")
_KINDS = {
    "lost": ("quantisation lost it", "bad"),
    "gained": ("quantisation gained it", "good"),
    "other words": ("other words, same verdict", "calm"),
}
_HEAT = (1e-4, 1e-3, 1e-2, 1e-1)
"""KL in nats from which a token is shown one shade darker."""
MOST_FILES = 4
"""Files drawn in one chart; the page has as many line colours."""


def side_by_side_section(files: RunFiles) -> dict[str, Any]:
    """What `rl-pipeline parity` found for this run, else what the quantize stage itself did."""
    return section(files.own_json("parity", "side_by_side.json") or _of_stage(files))


def _of_stage(files: RunFiles) -> dict[str, Any]:
    return files.json("quantize", "side_by_side.json")


def section(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the template; empty where nothing was compared."""
    if not table(figures, "files"):
        return {}
    return {
        "problems": number(figures.get("problems"), 6),
        "f16_accuracy": percent(figures.get("f16_accuracy")),
        "attribution": str(figures.get("attribution") or ""),
        "rows": rows_of(figures),
        "charts": _charts(figures),
        "examples": [
            _example(name, example)
            for name, facts in _files(figures)
            for example in rows(facts, "examples")
        ],
    }


def rows_of(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """The table, one row for each file."""
    problems = finite(figures.get("problems"))
    found = []
    for name, facts in _files(figures):
        identical = finite(facts.get("identical"))
        share = identical / problems if identical is not None and problems else None
        low, high = dig(facts, "kl", "ci95") or (None, None)
        parts_at = facts.get("first_divergence_median")
        found.append(
            {
                "name": name,
                "accuracy": percent(facts.get("accuracy")),
                "delta": interval(dig(facts, "accuracy_delta", "ci95")),
                "lost": number(facts.get("lost"), 6),
                "gained": number(facts.get("gained"), 6),
                "identical": percent(share),
                "median": "never" if parts_at is None else number(parts_at + 1, 6),
                "kl": number(dig(facts, "kl", "value")),
                "kl_interval": f"{number(low, 2)} … {number(high, 2)}",
            }
        )
    return found


def _files(figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The files, largest type first, repaired ones after the type they come from."""
    known = {name: place for place, name in enumerate(QUANT_ORDER)}

    def place(name: str) -> tuple[int, str]:
        return known.get(name.partition("+")[0], len(known)), name

    files = table(figures, "files")
    return [(name, files[name]) for name in sorted(files, key=place)]


def _charts(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    files = _files(figures)[:MOST_FILES]
    specs = (
        ("KL at each token of F16's answers", "nats", "kl_by_position", "position", "kl", 1),
        ("Answers still the same", "share", "still_the_same", "tokens", "share", 0),
    )
    charts = []
    for index, (title, unit, block, x, y, first) in enumerate(specs):
        series = [
            Series(name, tuple((float(p[x]) + first, finite(p[y])) for p in rows(facts, block)))
            for name, facts in files
        ]
        svg = line_chart(f"side-{index}", title, series, unit="token")
        labels = list(enumerate(s.label for s in series))
        charts.append({"title": title, "unit": unit, "svg": svg, "labels": labels})
    return charts


def _example(name: str, example: Mapping[str, Any]) -> dict[str, Any]:
    kind, tone = _KINDS.get(str(example.get("kind")), ("unknown", "warn"))
    asked = [m for m in rows(example, "f16", "messages") if m.get("role") == "user"]
    return {
        "file": name,
        "kind": kind,
        "tone": tone,
        "prompt": clipped(str(asked[0].get("content", "")) if asked else "(no prompt)", 300),
        "band": str(example.get("band", "")),
        "gold": clipped(str(example.get("gold", "")), 80),
        "parting": _parting(table(example, "parting"), name),
        "tokens": [
            _token(token, parts=place == dig(example, "parting", "position"))
            for place, token in enumerate(rows(example, "tokens"))
        ],
        "sides": [
            _side("F16", table(example, "f16")),
            _side(name, table(example, "file")),
        ],
    }


def _parting(parting: Mapping[str, Any], name: str) -> str:
    position = finite(parting.get("position"))
    if position is None:
        return "Both wrote the same tokens."
    said = [
        "had ended" if parting.get(side) is None else f"wrote “{clipped(str(parting[side]), 40)}”"
        for side in ("f16", "file")
    ]
    return f"They part at token {position + 1:.0f}: F16 {said[0]}, {name} {said[1]}."


def _token(token: Mapping[str, Any], *, parts: bool) -> dict[str, str]:
    kl = finite(token.get("kl"))
    level = 0 if kl is None else sum(kl >= limit for limit in _HEAT)
    top = "" if token.get("same_top") else ", another token first"
    return {
        "text": clipped(str(token.get("text", "")), 40),
        "css": f"h{level} part" if parts else f"h{level}",
        "title": f"KL {number(kl)} nats{top}",
    }


def _side(name: str, side: Mapping[str, Any]) -> dict[str, Any]:
    correct = side.get("correct") is True
    return {
        "name": name,
        "outcome": str(side.get("outcome", "unknown")).replace("_", " "),
        "tone": "good" if correct else "bad",
        "messages": [message(m) for m in answer_part(rows(side, "messages"))[:MOST_MESSAGES]],
    }


def write_page(figures: Mapping[str, Any], path: Path) -> Path:
    """The comparison as one file: no network, no script.

    Raises:
        ArtifactWriteError: the disk refused.
    """
    text = page_template(_TEMPLATE).render(
        title=str(figures.get("title", "")), side=section(figures)
    )
    return write_atomic(path, text)
