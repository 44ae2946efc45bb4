"""The lineage of a run: which artefact was made from which, walked both ways."""

from typing import Any

from flows.report.data import RunFiles, dig, quantised, table
from flows.report.graph import Edge, Node, lineage_graph
from flows.report.text import UNKNOWN, clipped_line, short_hash
from tasks.stages import STAGES

PARENTS = {"data": ("source",), **{n: s.inputs for n, s in STAGES.items() if s.inputs}}
"""What each stage reads; `source` is where the prompts come from."""
_IMPLIED = frozenset({("data", "package"), ("sft", "package"), ("sft", "quantize")})
"""Inputs the drawing leaves to the table: another arrow already leads there."""

_PLACES = {  # title, column, row
    "source": ("Prompts", 0, 1.0),
    "data": ("Data", 1, 1.0),
    "sft": ("SFT snapshot", 2, 0.2),
    "rl": ("Policy", 3, 1.0),
    "evaluation": ("Evaluation", 4, 0.2),
    "quantize": ("Quantisations", 4, 1.8),
    "package": ("Bundle", 5, 1.0),
}
_LANES = {("data", "evaluation"): -0.12, ("data", "quantize"): 1.8}
"""Edges that go round the boxes between their ends, and the row they do it on."""


def lineage_section(files: RunFiles) -> dict[str, Any]:
    """Graph, the table of artefacts both ways, and what made them."""
    nodes = [
        Node(key, title, _detail(files, key), column, row, key == "source" or files.ran(key))
        for key, (title, column, row) in _PLACES.items()
    ]
    edges = [
        Edge(parent, child, _LANES.get((parent, child)))
        for child, parents in PARENTS.items()
        for parent in parents
        if (parent, child) not in _IMPLIED
    ]
    svg = lineage_graph("lineage-graph", "Lineage from prompts to bundle", nodes, edges)
    artefacts = [_artefact(files, key) for key in _PLACES] + _files(files)
    return {"svg": svg, "artefacts": artefacts, "facts": _made_by(files)}


def _artefact(files: RunFiles, key: str) -> dict[str, str]:
    """One line of the table: hash, what it was made from, what it goes into."""
    children = [child for child, parents in PARENTS.items() if key in parents]
    record = files.record(key)
    return {
        "name": _PLACES[key][0],
        "sha": str(record.get("sha256") or ("–" if key == "source" else "not run")),
        "parents": ", ".join(_named(files, p) for p in PARENTS.get(key, ())) or "–",
        "children": ", ".join(_named(files, c) for c in children) or "the device",
        "uri": _source(files) if key == "source" else str(record.get("uri") or UNKNOWN),
    }


def _files(files: RunFiles) -> list[dict[str, str]]:
    """The GGUF files inside the quantisations, each by its own hash."""
    return [
        {
            "name": f"{name} file",
            "sha": str(facts.get("sha256") or UNKNOWN),
            "parents": _named(files, "rl"),
            "children": _named(files, "package") if facts.get("ships") is True else "not shipped",
            "uri": str(facts.get("file") or UNKNOWN),
        }
        for name, facts in quantised(files).items()
        if facts.get("sha256")
    ]


def _named(files: RunFiles, key: str) -> str:
    """Title and short hash."""
    sha = files.record(key).get("sha256")
    return _PLACES[key][0] + (f" {short_hash(sha)}" if sha else "")


def _detail(files: RunFiles, key: str) -> str:
    """Second line of a box."""
    if key == "source":
        return clipped_line(_source(files), 22)
    return short_hash(files.record(key).get("sha256")) if files.ran(key) else "not run"


def _source(files: RunFiles) -> str:
    """Where the prompts come from, as the config says."""
    source = table(files.config, "data", "source")
    return str(source.get("train") or source.get("dataset") or source.get("type") or UNKNOWN)


def _made_by(files: RunFiles) -> list[dict[str, str]]:
    """Code, settings, environment and tracking behind the artefacts."""
    summary = files.summary
    named = (
        ("Run", summary.get("run_id")),
        ("Git commit", summary.get("git_sha")),
        ("Uncommitted changes", _yes_no(summary.get("git_dirty"))),
        ("Config hash", summary.get("config_sha256")),
        ("Lock hash", summary.get("lock_sha256")),
        ("MLflow store", dig(summary, "mlflow", "tracking_uri")),
        ("MLflow run", dig(summary, "mlflow", "run_id")),
        ("Held-out set", files.json("evaluation", "summary.json").get("heldout_sha256")),
    )
    return [{"name": name, "value": str(value) if value else UNKNOWN} for name, value in named]


def _yes_no(value: object) -> str | None:
    return None if not isinstance(value, bool) else "yes" if value else "no"
