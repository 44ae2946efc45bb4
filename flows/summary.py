"""`runs/<run_id>/summary.json`: the run in figures, under keys that stay. Unknown is null.

The figures are read from what the stages left; the price of RL is taken over its ledger at the
price now configured, since a price must not make a stage run again.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.forecast import in_hindsight
from tasks.artifacts import ArtifactRecord, hash_json, write_json
from tasks.artifacts.machine import Machine
from tasks.artifacts.progress import read_metrics
from tasks.artifacts.provenance import GitState, lock_sha256
from tasks.rl.ledger import CostLedger, LedgerError
from tasks.run_context import RunContext, StageOutcome
from tasks.stage_calls import GX_IMPORT
from tasks.stages import STAGES
from tasks.tracking.operations import RunStatus
from tasks.tracking.stage_log import PARENT

SUMMARY_NAME = "summary.json"
RL_KEYS = (
    "steps",
    "samples",
    "effective_samples",
    "staleness_limit",
    "max_staleness_seen",
    "resumes",
    "reward_gate",
)
QUANT_KEYS = (
    "size_bytes",
    "bits_per_weight",
    "kld_mean",
    "top1",
    "ppl_ratio",
    "accuracy",
    "accuracy_delta_ci95",
    "ships",
    "why",
)


def write_summary(
    context: RunContext, machine: Machine, git: GitState, started_s: float, status: RunStatus
) -> dict[str, Any]:
    """Build the summary and write it into the run's folder."""
    summary = build_summary(context, machine, git, time.monotonic() - started_s, status)
    write_json(context.run_dir / SUMMARY_NAME, summary)
    return summary


def build_summary(
    context: RunContext, machine: Machine, git: GitState, wall_s: float, status: RunStatus
) -> dict[str, Any]:
    """The summary of a run that took `wall_s` so far."""
    config = context.config
    records = {o.stage: o.record for o in context.outcomes.values() if o.record is not None}
    return {
        "run_id": context.run_id,
        "status": status,
        "profile": config.profile,
        "git_sha": git.sha,
        "git_dirty": git.dirty,
        "config_sha256": hash_json(config.model_dump(mode="json")),
        "lock_sha256": lock_sha256(),
        "machine": asdict(machine),
        "peak_tree_bytes": context.sampler.peak_bytes or None,
        "wall_s": round(wall_s, 3),
        "stages": {name: _stage(context.outcomes.get(name)) for name in STAGES},
        "heldout": heldout(_read(records.get("evaluation"), "summary.json")),
        "rl": pick(_read(records.get("rl"), "summary.json"), RL_KEYS),
        "quant": quant(_read(records.get("quantize"), "parity.json")),
        "bundle": bundle(records.get("package")),
        "night": context.night,
        "promotion": context.promotion,
        "mlflow": {
            "tracking_uri": context.tracker.uri,
            "run_id": context.tracker.run_id(PARENT),
            "pending_operations": context.tracker.pending,
            "problem": context.tracker.problem,
        },
        "cost": cost(_read(records.get("rl"), "ledger.json"), config.cost.usd_per_device_hour)
        | in_hindsight(records.get("rl"), config),
        "overhead": _overhead(context, records.get("data"), wall_s),
        "warnings": list(context.warnings),
    }


def _read(record: ArtifactRecord | None, name: str) -> dict[str, Any]:
    """A JSON object a stage left; empty where it is missing or no object."""
    if record is None:
        return {}
    try:
        value = json.loads((record.path / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def pick(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """`values` under exactly `keys`; what is not there is null."""
    return {key: values.get(key) for key in keys}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _stage(outcome: StageOutcome | None) -> dict[str, Any]:
    if outcome is None:
        none = dict.fromkeys(("cached", "wall_s", "output_sha256", "made_in_s", "peak_tree_bytes"))
        return {"status": "not run", **none}
    return {
        "status": outcome.status,
        "cached": outcome.cached,
        "wall_s": round(outcome.wall_s, 3),
        "output_sha256": outcome.record.sha256 if outcome.record else None,
        "made_in_s": outcome.made_in_s,
        "peak_tree_bytes": outcome.peak_tree_bytes,
        **({"error": outcome.error} if outcome.error else {}),
    }


def heldout(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy before and after RL, by band (easiest first), and the paired difference."""
    sides = {side: _side(_mapping(evaluation.get(side))) for side in ("sft", "rl")}
    delta = pick(_mapping(evaluation.get("delta")), ("value", "ci95"))
    gate = _mapping(evaluation.get("gate"))
    return {**sides, "delta": delta, "promoted": gate.get("passed")}


def _side(block: Mapping[str, Any]) -> dict[str, Any]:
    bands = block.get("by_band")
    rows = [pick(b, ("band", "accuracy", "n")) for b in bands] if isinstance(bands, list) else None
    return {**pick(block, ("accuracy", "n")), "by_band": rows}


def quant(parity: Mapping[str, Any]) -> dict[str, Any]:
    """Size and parity of F16 and of each quantisation that was made."""
    shown = {}
    for name, facts in _mapping(parity.get("quant")).items():
        shown[name] = pick(_mapping(facts), QUANT_KEYS)
        kld = shown[name]["kld_mean"]
        if isinstance(kld, dict):  # an interval: the summary keeps its middle
            shown[name]["kld_mean"] = kld.get("value")
    return shown


def bundle(record: ArtifactRecord | None) -> dict[str, Any]:
    """Where the bundle is, its hash, and whether it is signed."""
    if record is None:
        return {"path": None, "sha256": None, "signed": None}
    path = record.meta.get("bundle") or str(record.path / "bundle")
    return {"path": path, "sha256": record.sha256, "signed": record.meta.get("signed")}


def cost(ledger: Mapping[str, Any], usd_per_device_hour: float) -> dict[str, Any]:
    """What RL cost, split by use, at the price configured now; null where there is no ledger."""
    try:
        books = CostLedger.from_json({**ledger, "usd_per_device_hour": usd_per_device_hour})
    except (KeyError, TypeError, ValueError, AttributeError, LedgerError):
        unknown = ("usd", "device_s", "effective_samples", "usd_per_effective_sample")
        return {**dict.fromkeys(unknown), "usd_per_device_hour": usd_per_device_hour}
    return {**asdict(books.cost()), "usd_per_device_hour": usd_per_device_hour}


def _overhead(context: RunContext, data: ArtifactRecord | None, wall_s: float) -> dict[str, Any]:
    """Seconds in Prefect, MLflow and Great Expectations, and their share of the wall-clock.

    GX time counts only where data prep ran in this run; null where it did not leave it.
    """
    outcome = context.outcomes.get("data")
    gx_s = 0.0 if outcome is not None and outcome.cached else gx_seconds(data)
    known = [context.prefect_s, context.tracker.spent_s, *([] if gx_s is None else [gx_s])]
    return {
        "prefect_s": round(context.prefect_s, 3),
        "mlflow_s": round(context.tracker.spent_s, 3),
        "gx_s": None if gx_s is None else round(gx_s, 3),
        "share": round(sum(known) / wall_s, 4) if wall_s > 0 and gx_s is not None else None,
    }


def gx_seconds(data: ArtifactRecord | None) -> float | None:
    """Import and validation time of Great Expectations in data prep; None where unknown."""
    gate = _read(data, "gate.json")
    verdicts = [*gate.get("verdicts", ()), *gate.get("as_read", ())]
    if data is None or not verdicts or any("seconds" not in v for v in verdicts):
        return None
    try:
        lines = read_metrics(data.path / "metrics.jsonl")
    except OSError:
        return None
    imports = [line["values"][GX_IMPORT] for line in lines if GX_IMPORT in line["values"]]
    return sum(v["seconds"] for v in verdicts) + imports[-1] if imports else None


def link_latest(runs_dir: Path, run_id: str) -> None:
    """Point `runs/latest` at the run, in one step."""
    folder = Path(tempfile.mkdtemp(dir=runs_dir, prefix=".latest-"))
    try:
        os.symlink(run_id, folder / "link", target_is_directory=True)
        os.replace(folder / "link", runs_dir / "latest")
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
