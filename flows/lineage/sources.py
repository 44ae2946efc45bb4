"""Where lineage is read from: the store, the runs, the promotion ledger, the devices.

Everything is read from what stages left under their content hashes; nothing is inferred from names
or times. `flows.lineage.query` adds what only a question needs: rows, files, foreign bundles.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.lineage.graph import Lineage, Node
from tasks.artifacts import hash_json
from tasks.artifacts.store import Finished, StageFolder, finished_outputs
from tasks.tracking.operations import Speaker
from tasks.tracking.output_search import search_output
from tasks.tracking.promotion_ledger import ledgers

TITLES = {
    "data": "data",
    "sft": "SFT snapshot",
    "rl": "policy",
    "evaluation": "evaluation",
    "quantize": "quantisations",
    "package": "bundle",
}
GGUF = ".gguf"


def gather(runs_dir: Path) -> Lineage:
    """All that is known under a runs folder."""
    graph = Lineage()
    outputs = list(finished_outputs(runs_dir / "store"))
    for folder, finished in outputs:
        graph.add(output_node(folder, finished))
    for folder, finished in outputs:
        _add_inputs(graph, folder, finished)
        _add_models(graph, folder, finished)
    for folder, finished in outputs:
        if finished.record.kind == "bundle":
            _link_bundle(graph, folder, finished)
    _add_runs(graph, runs_dir)
    _add_releases(graph, runs_dir)
    _add_devices(graph, runs_dir)
    return graph


def fill_from_mlflow(graph: Lineage, speaker: Speaker) -> int:
    """Look what is missing up in MLflow, and what that was made from; returns how many it knew."""
    known, waiting = 0, [n for n in graph.nodes() if not n.found and n.sha256]
    while waiting:
        node = waiting.pop()
        logged = search_output(speaker, str(node.sha256))
        if logged is None:
            continue
        known += 1
        facts = {"stage": logged.stage, "mlflow run": logged.mlflow_run_id, "was in": logged.uri}
        graph.extend(
            node.key, facts={**facts, **({"runs": logged.run_id} if logged.run_id else {})}
        )
        for stage, sha256 in logged.inputs.items():
            if sha256 not in graph:
                graph.add(missing_node(sha256, TITLES.get(stage, stage)))
                waiting.append(graph.node(sha256))
            graph.link(sha256, node.key)
    return known


def output_node(folder: StageFolder, finished: Finished) -> Node:
    """The node of a stage's output."""
    record = finished.record
    body = read_json(folder.control / "finished.json")
    request = read_json(folder.control / "request.json")
    key = read_json(folder.control / "key.json")
    facts = {
        "stage": folder.stage,
        "files": str(len(finished.files)),
        "made": _when(body.get("finished_at")),
        "took": f"{finished.wall_s:.1f} s",
        "code": hash_json(key.get("code") or {})[:12],
        "lock": hash_json(key.get("lock") or {})[:12],
        "git": _git(request.get("facts") or {}),
        "mlflow run": finished.mlflow_run_id or "",
    }
    if record.kind == "dataset":
        facts["prompt rows"] = _rows(folder.path / "train.jsonl", record.meta.get("train_rows"))
    names = [str(record.uri), str(folder.path)]
    if archive := record.meta.get("archive_sha256"):
        names.append(str(archive))
    return Node(
        record.sha256,
        record.kind,
        TITLES.get(folder.stage, folder.stage),
        record.sha256,
        str(folder.path),
        True,
        {name: value for name, value in facts.items() if value},
        tuple(names),
    )


def missing_node(sha256: str, title: str) -> Node:
    """A node for what something was made from and that is not here any more."""
    return Node(sha256, "missing", title, sha256, None, False)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _rows(path: Path, count: object) -> str:
    """How many rows there are, and an id to ask for."""
    try:
        with path.open("rb") as lines:
            first = json.loads(lines.readline())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} cannot be read"
    return f"{count} in {path}, the first is {first}"


def _when(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _git(facts: Mapping[str, Any]) -> str:
    sha = facts.get("git_sha")
    return f"{str(sha)[:12]}{' with changes' if facts.get('git_dirty') else ''}" if sha else ""


def _add_inputs(graph: Lineage, folder: StageFolder, finished: Finished) -> None:
    """Edges from other stages' outputs, from the user's files, and from a generator."""
    key = read_json(folder.control / "key.json")
    child = finished.record.sha256
    for name, sha256 in (key.get("inputs") or {}).items():
        if sha256 not in graph:
            graph.add(missing_node(sha256, TITLES.get(name, name)))
        graph.link(sha256, child)
    config = key.get("config") or {}
    for name, sha256 in (key.get("files") or {}).items():
        place = str(config.get(name) or name)
        graph.add(
            Node(
                f"file:{sha256}",
                "source",
                Path(place).name,
                sha256,
                place,
                Path(place).exists(),
                {"named by": name},
                (place,),
            )
        )
        graph.link(f"file:{sha256}", child)
    kind = config.get("data.source.type")
    if folder.stage == "data" and kind and kind != "file":
        _add_generator(graph, child, str(kind), config)


def _add_generator(graph: Lineage, child: str, kind: str, config: Mapping[str, Any]) -> None:
    """Generated prompts have no file; their settings and seed are their source."""
    settings = {k: v for k, v in config.items() if k.startswith(("data.source", "data.seed"))}
    key = f"generator:{hash_json(settings)}"
    facts = {name.removeprefix("data."): str(value) for name, value in sorted(settings.items())}
    graph.add(Node(key, "source", f"{kind} generator", None, None, True, facts))
    graph.link(key, child)


def _add_models(graph: Lineage, folder: StageFolder, finished: Finished) -> None:
    """GGUF files of a quantise output are things of their own: bundles carry some of them."""
    if finished.record.kind != "quantisations":
        return
    for name, facts in finished.files.items():
        if name.endswith(GGUF) and "/" not in name:
            sha256 = str(facts["sha256"])
            where = str(folder.path / name)
            graph.add(
                Node(sha256, "gguf", name, sha256, where, True, {"bytes": str(facts["size"])})
            )
            graph.link(finished.record.sha256, sha256)


def _link_bundle(graph: Lineage, folder: StageFolder, finished: Finished) -> None:
    manifest = read_json(Path(folder.path) / "bundle" / "manifest.json")
    link_models(graph, finished.record.sha256, manifest)


def link_models(graph: Lineage, bundle: str, manifest: Mapping[str, Any]) -> None:
    """Edges from the GGUF files a bundle carries."""
    for quant, entry in (manifest.get("models") or {}).items():
        sha256 = str(entry.get("sha256"))
        if sha256 not in graph:
            graph.add(missing_node(sha256, f"{quant}{GGUF}"))
        graph.link(sha256, bundle)


def _add_runs(graph: Lineage, runs_dir: Path) -> None:
    """A run's name means the last thing it made; what it used says which runs used it."""
    for path in sorted(runs_dir.glob("*/records.json")):
        if path.parent.is_symlink():
            continue
        run_id, records = path.parent.name, read_json(path)
        last = None
        for stage in sorted(records, key=_order):
            record = records[stage]
            sha256 = str(record.get("sha256"))
            if sha256 not in graph:
                graph.add(missing_node(sha256, TITLES.get(stage, stage)))
            used = graph.node(sha256).facts.get("runs", "")
            graph.extend(sha256, facts={"runs": f"{used} {run_id}".strip()})
            last = sha256
        if last is not None:
            graph.extend(last, names=(run_id,))


def _order(stage: str) -> int:
    """Stages in the order they run; others before them."""
    return list(TITLES).index(stage) if stage in TITLES else -1


def _add_releases(graph: Lineage, runs_dir: Path) -> None:
    """Model versions of the promotion ledger, and which of them are champion and previous."""
    for ledger in ledgers(runs_dir):
        state = ledger.state()
        for release in state.releases:
            held = [
                alias
                for alias, holder in (("champion", state.champion), ("previous", state.previous))
                if holder is not None and holder.version == release.version
            ]
            name = f"{release.model}/{release.version}"
            names = (name, *held, *(f"{release.model}/{alias}" for alias in held))
            facts = {"run": release.run_id, **({"alias": ", ".join(held)} if held else {})}
            key, where = f"model:{name}", str(ledger.path)
            graph.add(Node(key, "version", release.name, None, where, True, facts, names))
            if release.bundle_sha256 not in graph:
                graph.add(missing_node(release.bundle_sha256, "bundle"))
            graph.link(release.bundle_sha256, key)


def _add_devices(graph: Lineage, runs_dir: Path) -> None:
    """What runs on each device, as last seen."""
    for path in sorted((runs_dir / "devices").glob("*.json")):
        state = read_json(path)
        release = state.get("release")
        if not release:
            continue
        name = path.stem
        facts = {"seen": _when(state.get("time")) or str(state.get("time") or "")}
        graph.add(
            Node(f"device:{name}", "device", name, None, str(path), True, facts, names=(name,))
        )
        if release not in graph:
            graph.add(missing_node(str(release), "bundle"))
        graph.link(str(release), f"device:{name}")
