"""What MLflow is told of deployments: a run for each device and attempt, with its golden report.

They stand in an experiment of their own, `<experiment>-devices`. A store that does not answer holds
nothing up: what it did not take waits in the deployment's folder, and is said so.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema.package import TrackingConfig
from deployment.fleet.device import DeviceResult
from deployment.service_files import services_environment
from tasks.artifacts import write_json
from tasks.tracking.operations import (
    Operation,
    create_run,
    end_run,
    log_file,
    log_metrics,
    now_ms,
    set_tags,
)
from tasks.tracking.tracker import open_tracker, owner_tags

FOLDER = "deployments"


def report_of(result: DeviceResult, agent: str, bundle: str) -> dict[str, Any]:
    """The golden report of one device, as it is kept and logged."""
    return {
        "device": result.device,
        "action": result.action,
        "agent": agent,
        "bundle": bundle,
        "release": result.release,
        "previous": result.previous,
        "serving": result.serving,
        "result": result.outcome,
        "reason": result.reason,
        "error": result.error,
        "golden": result.golden,
        "tokens_per_s": result.tokens_per_s,
        "sent_bytes": result.sent_bytes,
        "seconds": round(result.seconds, 3),
    }


def _tags(report: Mapping[str, Any]) -> dict[str, str]:
    kept = ("device", "action", "agent", "release", "previous", "serving", "result", "reason")
    return {name: str(report[name]) for name in kept if report[name] is not None}


def _operations(report: Mapping[str, Any], path: Path) -> list[Operation]:
    name = str(report["device"])
    title = f"{report['action']} {name} {str(report['release'])[:12]}"
    figures = {key: report[key] for key in ("tokens_per_s", "sent_bytes", "seconds")}
    values = {key: float(value) for key, value in figures.items() if value is not None}
    good = report["result"] in ("deployed", "unchanged")
    line = {"step": 0, "time_s": now_ms() / 1000, "values": values}
    return [
        create_run(name, title, None, {"kind": "deployment", **_tags(report), **owner_tags()}),
        set_tags(name, {"mlflow.note.content": _note(report)}),
        log_metrics(name, [line]),
        log_file(name, path, None),
        end_run(name, "FINISHED" if good else "FAILED"),
    ]


def _note(report: Mapping[str, Any]) -> str:
    serving = str(report["serving"] or "not known")[:12]
    said = [f"{report['action']} on {report['device']}: {report['result']}; serving: {serving}"]
    said += [str(report[key]) for key in ("reason", "golden") if report[key]]
    return "\n\n".join(json.dumps(text, ensure_ascii=False)[1:-1] for text in said)


def log_deployment(
    results: Sequence[DeviceResult],
    agent: str,
    bundle: str,
    tracking: TrackingConfig,
    runs_dir: Path,
    attempt: str,
) -> list[str]:
    """Keep and log a report for each device that was tried; returns what could not be logged."""
    folder = runs_dir / "devices" / FOLDER / attempt
    service = services_environment(runs_dir).get("MLFLOW_TRACKING_URI")
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or service
    tracker = open_tracker(runs_dir, folder, f"{tracking.experiment}-devices", uri)
    for result in results:
        if result.outcome == "not_tried":
            continue
        report = report_of(result, agent, bundle)
        path = write_json(folder / f"{result.device}.json", report)
        tracker.say(*_operations(report, path))
    if not tracker.pending:
        return []
    return [
        f"MLflow did not take {tracker.pending} operations ({tracker.problem}); they are kept: "
        f"rl-pipeline upload {folder} sends them when the store answers"
    ]
