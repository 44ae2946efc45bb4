"""From what a person types to a node: device, bundle, run, version, hash, file or data row."""

import hashlib
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from deployment.jetson.on_device.verify import BundleError, read_manifest
from flows.lineage.graph import Lineage, LineageQueryError, Node
from flows.lineage.rows import find_row
from flows.lineage.sources import TITLES, link_models, missing_node, read_json
from tasks.artifacts import hash_file
from tasks.artifacts.store import finished_outputs

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20


def resolve(graph: Lineage, runs_dir: Path, query: str) -> Node:
    """The node meant by `query`; adds what the graph did not have (a row, a file, a bundle).

    Raises:
        LineageQueryError: nothing, or several things, are called so.
    """
    path = Path(query)
    if query and path.exists():
        node = _by_path(graph, runs_dir, path)
        if node is not None:
            return node
    try:
        return graph.find(query)
    except LineageQueryError:
        node = _file_by_hash(graph, runs_dir, query) or find_row(graph, runs_dir, query)
        if node is None:
            raise
        return node


def _by_path(graph: Lineage, runs_dir: Path, path: Path) -> Node | None:
    """A run's folder, a bundle or its archive, a stage's folder, or any file by its content."""
    if path.is_dir():
        if (path / "records.json").is_file():
            return _run(graph, path)
        for folder in (path, path / "bundle"):
            if (folder / MANIFEST).is_file():
                return _bundle(graph, (folder / MANIFEST).read_bytes(), str(folder))
        return graph.find(str(path)) if any(str(path) in n.names for n in graph.nodes()) else None
    if path.name.endswith((".tar.gz", ".tgz")):
        return _bundle(graph, _manifest_in(path), str(path))
    sha256 = hash_file(path)
    if sha256 in graph or f"file:{sha256}" in graph:
        return graph.node(sha256 if sha256 in graph else f"file:{sha256}")
    return _file_by_hash(graph, runs_dir, sha256)


def _run(graph: Lineage, run_dir: Path) -> Node:
    """The last thing a run made."""
    records = read_json(run_dir / "records.json")
    for stage in (s for s in reversed(TITLES) if s in records):
        sha256 = str(records[stage]["sha256"])
        if sha256 not in graph:
            graph.add(missing_node(sha256, stage))
        return graph.node(sha256)
    raise LineageQueryError(f"run {run_dir} finished no stage; there is nothing to trace")


def _bundle(graph: Lineage, raw: bytes, where: str) -> Node:
    """A bundle by its manifest, also one from elsewhere: it says what it was made from.

    Raises:
        LineageQueryError: the manifest cannot be read.
    """
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 in graph and graph.node(sha256).found:
        return graph.node(sha256)
    try:
        manifest: dict[str, Any] = read_manifest(raw)
    except BundleError as error:
        raise LineageQueryError(f"{where} is no bundle that can be read: {error}") from error
    facts = {"profile": str(manifest.get("profile", "")), "git": _code(manifest)}
    graph.add(Node(sha256, "bundle", "bundle", sha256, where, True, facts, (where,)))
    for name, parent in (manifest.get("lineage") or {}).items():
        if name in TITLES and isinstance(parent, str):
            if parent not in graph:
                graph.add(missing_node(parent, name))
            graph.link(parent, sha256)
    link_models(graph, sha256, manifest)
    return graph.node(sha256)


def _code(manifest: dict[str, Any]) -> str:
    code = manifest.get("code") or {}
    return f"{str(code.get('git_sha', ''))[:12]}{' with changes' if code.get('dirty') else ''}"


def _manifest_in(archive: Path) -> bytes:
    """The manifest inside an archive, nothing else of it.

    Raises:
        LineageQueryError: it is no archive, or has no manifest.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if len(parts) == 2 and parts[1] == MANIFEST and member.size <= MAX_MANIFEST_BYTES:
                    handle = tar.extractfile(member)
                    if handle is not None:
                        return handle.read(MAX_MANIFEST_BYTES)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise LineageQueryError(f"{archive} cannot be read as a bundle: {error}") from error
    raise LineageQueryError(f"{archive} holds no {MANIFEST}; give the archive a run packed")


def _file_by_hash(graph: Lineage, runs_dir: Path, query: str) -> Node | None:
    """A file inside some stage's output, by its hash; it becomes a node made with that output."""
    wanted = query.lower()
    if len(wanted) < 6 or any(c not in "0123456789abcdef" for c in wanted):
        return None
    hits: dict[str, list[tuple[str, Path, int]]] = {}
    for folder, finished in finished_outputs(runs_dir / "store"):
        for name, facts in finished.files.items():
            sha256 = str(facts["sha256"])
            if sha256.startswith(wanted):
                place = (finished.record.sha256, folder.path / name, int(facts["size"]))
                hits.setdefault(sha256, []).append(place)
    if len(hits) > 1:
        listed = "\n".join(f"  {sha}  {places[0][1]}" for sha, places in sorted(hits.items()))
        raise LineageQueryError(f"{query!r} can mean {len(hits)} files; give one of\n{listed}")
    for sha256, places in hits.items():
        _, path, size = places[0]
        graph.add(
            Node(sha256, "file", path.name, sha256, str(path), path.exists(), {"bytes": str(size)})
        )
        for output, _, _ in places:
            graph.link(output, sha256)
        return graph.node(sha256)
    return None
