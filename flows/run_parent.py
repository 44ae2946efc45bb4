"""The MLflow run of a whole pipeline run: opened before the first stage, closed after the last."""

import getpass
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from tasks.artifacts import hash_json
from tasks.artifacts.provenance import GitState, lock_sha256
from tasks.events import Event
from tasks.run_context import RunContext
from tasks.tracking.operations import (
    RunStatus,
    create_run,
    end_run,
    log_figures,
    log_file,
    log_params,
    set_tags,
)
from tasks.tracking.reconcile import close_orphans
from tasks.tracking.run_face import NOTE, description, figures
from tasks.tracking.stage_log import PARENT, link_outputs
from tasks.tracking.tracker import owner_tags

PAGES = ("summary.json", "records.json", "report.html", "lineage.html")


def device_name() -> str:
    """What the work runs on, for people."""
    gpu = Path("/proc/driver/nvidia/version").exists()
    return (
        f"{'cuda' if gpu else 'cpu'} ({platform.machine()}, {len(os.sched_getaffinity(0))} cores)"
    )


def open_parent(context: RunContext, git: GitState) -> None:
    """Close runs of dead owners, then open this run's MLflow parent."""
    config = context.config
    with context.tracker.clock():
        close_orphans(context.tracker.speaker)
    tags = {
        "run_id": context.run_id,
        "profile": config.profile,
        "config.sha256": hash_json(config.model_dump(mode="json")),
        "lock.sha256": lock_sha256(),
        "device": device_name(),
        "seed": f"data={config.data.seed} sft={config.sft.seed} rl={config.rl.seed}",
        "mlflow.source.name": "rl-pipeline",
        "mlflow.source.type": "PROJECT",
        "mlflow.user": getpass.getuser(),
        **owner_tags(),
    }
    if git.sha is not None:
        tags["mlflow.source.git.commit"] = git.sha
        tags |= {"git.sha": git.sha, "git.dirty": str(git.dirty).lower()}
    if (prefect_id := flow_run.get_id()) is not None:
        tags["prefect.flow_run_id"] = str(prefect_id)
    context.tracker.say(
        create_run(PARENT, context.run_id, None, tags),
        log_params(PARENT, {"profile": config.profile, "config_sha256": tags["config.sha256"]}),
        log_file(PARENT, context.run_dir / "config.json", None),
    )
    context.facts.update(
        run_id=context.run_id,
        runs_dir=context.runs_dir.as_posix(),
        git_sha=git.sha,
        git_dirty=git.dirty,
        mlflow_tracking_uri=context.tracker.uri,
        mlflow_run_id=context.tracker.run_id(PARENT),
        config_sha256=tags["config.sha256"],
        lock_sha256=tags["lock.sha256"],
    )


def close_parent(context: RunContext, summary: Mapping[str, Any], status: RunStatus) -> None:
    """Log what the run left, close its MLflow run, and say what could not be logged."""
    reused = bool(context.outcomes) and all(o.cached for o in context.outcomes.values())
    shown = {"output.status": status, "cached": str(reused).lower()}
    context.tracker.say(
        set_tags(PARENT, {**shown, NOTE: description(summary)}),
        log_figures(PARENT, figures(summary)),
        *link_outputs(PARENT, context.config.profile, context.records()),
        *(
            log_file(PARENT, context.run_dir / name, None)
            for name in PAGES
            if (context.run_dir / name).exists()
        ),
        end_run(PARENT, status),
    )
    if context.tracker.pending:
        context.tell(
            Event(
                "warning",
                message=f"MLflow did not take {context.tracker.pending} operations "
                f"({context.tracker.problem}); they are kept in {context.run_dir}; "
                "`rl-pipeline upload` sends them when the store answers",
            )
        )
