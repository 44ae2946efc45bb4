"""What may be taken away under a runs folder, and what must stay.

What champion, previous, devices and the newest runs were made from stays, all the way back to the
prompts; the lineage graph says what that is. Nothing else is guessed: folders this project did not
make are not looked at.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.schema.operations import RetentionConfig
from flows.lineage.graph import Lineage
from flows.lineage.sources import gather, read_json
from flows.nightly.log import night_logs
from flows.run_lock import RunLock
from tasks.artifacts.store import CONTROL, finished_outputs
from tasks.tracking.promotion_ledger import ledgers

DOOMED = ".gc-"
BACKUPS = "backups"
_LEFTOVERS = (".discarded", ".corrupt")


@dataclass(frozen=True)
class Doomed:
    """Something that nothing needs."""

    path: Path
    bytes: int
    why: str


@dataclass(frozen=True)
class RetentionPlan:
    """What stays, by reason, and what goes."""

    kept: dict[str, list[str]]
    doomed: list[Doomed]

    @property
    def bytes(self) -> int:
        """What is freed."""
        return sum(d.bytes for d in self.doomed)


def plan_retention(runs_dir: Path, config: RetentionConfig) -> RetentionPlan:
    """Look, and take nothing away.

    Raises:
        LedgerError: a promotion ledger cannot be trusted; then nothing is known to be unneeded.
    """
    graph = gather(runs_dir)
    runs = newest_first(runs_dir)
    kept_runs = runs[: config.keep_runs]
    kept = _roots(graph, runs_dir, kept_runs)
    needed = {n.key for keys in kept.values() for k in keys for n in [graph.node(k)]}
    needed |= {n.key for key in list(needed) for n in graph.ancestors(key)}
    oldest_s = min((r.stat().st_mtime for r in kept_runs), default=0.0)
    doomed = [
        *_old_runs(runs[config.keep_runs :], needed, graph),
        *_unneeded_outputs(runs_dir / "store", needed),
        *_unfinished(runs_dir / "store", oldest_s),
        *_leftovers(runs_dir / "store"),
        *_old_backups(runs_dir / BACKUPS, config.keep_backups),
    ]
    return RetentionPlan(kept, sorted(doomed, key=lambda d: -d.bytes))


def newest_first(runs_dir: Path) -> list[Path]:
    """Folders of runs; their names begin with their time."""
    found = (p.parent for p in runs_dir.glob("*/config.json"))
    return sorted((p for p in found if not p.is_symlink()), key=lambda p: p.name, reverse=True)


def _roots(graph: Lineage, runs_dir: Path, runs: Iterable[Path]) -> dict[str, list[str]]:
    """What is kept for its own sake, by reason."""
    roots: dict[str, list[str]] = {}
    for ledger in ledgers(runs_dir):
        state = ledger.state()
        for alias, release in (("champion", state.champion), ("previous", state.previous)):
            if release is not None:
                shas = [release.bundle_sha256, *(r.sha256 for r in release.records.values())]
                roots[f"{alias} of {ledger.model}"] = [s for s in shas if s in graph]
    for log in night_logs(runs_dir):
        last = log.last_trained()
        data = last.record("data") if last is not None else None
        if data is not None and data.sha256 in graph:  # the next night compares its rows with these
            roots[f"last night of {log.path.stem}"] = [data.sha256]
    for node in graph.nodes():
        if node.kind == "device":
            roots[f"device {node.title}"] = [node.key]
    for run in runs:
        records = read_json(run / "records.json")
        shas = [str(record["sha256"]) for record in records.values()]
        roots[f"run {run.name}"] = [s for s in shas if s in graph]
    return roots


def _old_runs(runs: Iterable[Path], needed: set[str], graph: Lineage) -> Iterator[Doomed]:
    """Runs beyond the newest; one whose bundle is still needed keeps its report and summary."""
    for run in runs:
        records = read_json(run / "records.json")
        last = records.get("package") or {}
        if str(last.get("sha256")) in needed:
            continue
        yield Doomed(run, size_of(run), "older than the runs kept")


def _unneeded_outputs(store: Path, needed: set[str]) -> Iterator[Doomed]:
    for folder, finished in finished_outputs(store):
        if finished.record.sha256 not in needed:
            why = f"{folder.stage}: nothing that is kept was made from it"
            yield Doomed(folder.path, size_of(folder.path), why)


def _unfinished(store: Path, oldest_s: float) -> Iterator[Doomed]:
    """Outputs that were never finished, unless a kept run may go on from them."""
    for control in sorted(store.glob(f"*/*/{CONTROL}")):
        if not (control / "finished.json").exists() and control.stat().st_mtime < oldest_s:
            path = control.parent
            yield Doomed(path, size_of(path), f"{path.parent.name}: never finished, and old")


def _leftovers(store: Path) -> Iterator[Doomed]:
    for path in sorted(store.glob("*/*")):
        if path.name.endswith(_LEFTOVERS) or path.name.startswith(DOOMED):
            yield Doomed(path, size_of(path), "set aside by an earlier run or gc")


def _old_backups(folder: Path, keep: int) -> Iterator[Doomed]:
    found = sorted(folder.glob("*"), key=lambda p: p.name, reverse=True)
    for path in found[keep:]:
        yield Doomed(path, size_of(path), f"older than the {keep} backups kept")


def size_of(path: Path) -> int:
    """Bytes of a file or of all below a folder; links are not followed, shared files count once."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    seen: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(path):
        for name in names:
            stat = Path(root, name).lstat()
            seen[(stat.st_dev, stat.st_ino)] = stat.st_size
    return sum(seen.values())


def collect_garbage(runs_dir: Path, config: RetentionConfig) -> RetentionPlan:
    """Take away what nothing needs; a run in progress refuses it. Returns what was done.

    Each folder first gets another name, so that one half taken away is never mistaken for whole.

    Raises:
        RunLockedError: a run is in progress.
    """
    with RunLock(runs_dir, "gc"):
        done = plan_retention(runs_dir, config)
        for doomed in done.doomed:
            _take_away(doomed.path)
    return done


def _take_away(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    aside = path if path.name.startswith(DOOMED) else path.with_name(f"{DOOMED}{path.name}")
    if aside != path:
        path.rename(aside)
    shutil.rmtree(aside)
