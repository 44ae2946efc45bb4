"""Who hears of a ledger entry: people by alert, MLflow by its aliases, devices by a deployment."""

import os
from pathlib import Path

from configs.schema import PipelineConfig
from deployment.service_files import services_environment
from flows.alerts.send import Alert, send_alert
from tasks.tracking.promotion_ledger import Entry, LedgerError, PromotionLedger, Release

_TITLES = {
    "promote": "{name} is the champion",
    "approve": "{name} was approved and is the champion",
    "rollback": "rolled back to {name}",
    "reject": "{name} was rejected",
    "candidate": "{name} stays a candidate",
}


def promotion_alert(entry: Entry) -> Alert:
    """What people are told of an entry; the same line of the same ledger is one alert."""
    release = entry.release
    waiting = entry.action == "candidate" and entry.evidence.get("waiting") is True
    title = _TITLES[entry.action].format(name=release.name)
    if waiting:
        title = f"{release.name} waits for approval"
    body = [
        entry.reason,
        f"by {entry.actor}, run {release.run_id}, bundle {release.bundle_sha256[:12]}",
    ]
    if waiting:
        body.append(
            f"look and decide until {entry.evidence.get('approve_by')}: "
            f"rl-pipeline approve {release.model}:{release.version}"
        )
    return Alert(
        "promotion",
        f"rl-pipeline: {title}",
        "\n".join(body),
        f"promotion:{release.model}:{entry.sequence}:{entry.hash[:12]}",
    )


def spread(entry: Entry, ledger: PromotionLedger, config: PipelineConfig) -> list[str]:
    """Tell MLflow and people of an entry a person made; returns what could not be told."""
    runs_dir = ledger.path.parent.parent
    notes = []
    if (problem := move_aliases(ledger, config, runs_dir)) is not None:
        notes.append(
            f"the ledger is right, but MLflow's aliases wait: {problem}; the next run moves them, "
            "or rl-pipeline history --repair"
        )
    notes += send_alert(config.alerts, promotion_alert(entry), runs_dir).problems
    return notes


def move_aliases(ledger: PromotionLedger, config: PipelineConfig, runs_dir: Path) -> str | None:
    """Bring MLflow's registry in line outside a run; returns why it could not be."""
    from tasks.tracking.reachable import why_unreachable
    from tasks.tracking.registry import ForeignRegistryError, follow_ledger
    from tasks.tracking.tracker import open_tracker, store_errors

    service = services_environment(runs_dir).get("MLFLOW_TRACKING_URI")
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or service
    speaker = open_tracker(runs_dir, ledger.path.parent, config.tracking.experiment, uri).speaker
    if (problem := why_unreachable(speaker.uri)) is not None:
        return problem
    try:
        follow_ledger(speaker.client, ledger)
    except (ForeignRegistryError, LedgerError) as error:
        return str(error)
    except store_errors() as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


def deploy_if_asked(release: Release, config: PipelineConfig, runs_dir: Path) -> str | None:
    """Start the deployment of a new champion where `promotion.deploy` says so.

    Returns what was started or why it failed, in words; None where nothing was asked for.
    """
    if not config.promotion.deploy:
        return None
    from flows.devices.flow import deploy_champion  # the fleet's code, only where it is wanted

    return deploy_champion(release, config, runs_dir)
