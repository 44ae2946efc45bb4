"""Which alerts a run that has ended calls for: a pure look at its summary and its error."""

from collections.abc import Mapping
from typing import Any

from configs.schema.operations import AlertsConfig
from flows.alerts.send import Alert
from flows.report.data import dig, table
from tasks.supervise import StageFailedError

GATE_ERRORS = frozenset(
    {
        "DataGateError",
        "NoTrainingRowsError",
        "RewardGateError",
        "PromotionRefusedError",
        "ParityGateError",
        "NothingShipsError",
    }
)
BREAKER_ERRORS = frozenset({"SentinelTrippedError", "NothingToLearnError", "SyncProofError"})


def run_alerts(
    config: AlertsConfig, summary: Mapping[str, Any], error: Exception | None
) -> list[Alert]:
    """Alerts of a run, given the summary it left and the error that ended it, if one did.

    What a reused stage once said is not told again.
    """
    body = dict(summary)
    found = [
        _error_alert(body, error) if error is not None else None,
        _gate_alert(body),
        _cost_alert(config, body),
    ]
    return [alert for alert in found if alert is not None]


def _made_now(summary: dict[str, Any], stage: str) -> bool:
    return dig(summary, "stages", stage, "cached") is False


def _foot(summary: dict[str, Any]) -> str:
    return f"\nrun {summary.get('run_id')}, profile {summary.get('profile')}"


def _error_alert(summary: dict[str, Any], error: Exception) -> Alert:
    profile = summary.get("profile")
    kind, stage, advice = type(error).__name__, "", ""
    message = str(error)
    if isinstance(error, StageFailedError):
        kind, stage, message = error.kind, error.stage, error.message
        advice = f"\n{error.advice}"
    event, what = "failure", "failed"
    if kind in GATE_ERRORS:
        event, what = "gate", "was stopped by a gate"
    elif kind in BREAKER_ERRORS:
        event, what = "breaker", "was stopped by a breaker"
    where = f"stage {stage} " if stage else "the run "
    return Alert(
        event,
        f"rl-pipeline {profile}: {where}{what} ({kind})",
        f"{message}{advice}{_foot(summary)}",
        f"{event}:{profile}:{stage or 'run'}:{kind}",
    )


def _gate_alert(summary: dict[str, Any]) -> Alert | None:
    """Gates that failed without stopping the run."""
    failed: dict[str, str] = {}
    if _made_now(summary, "evaluation") and dig(summary, "heldout", "promoted") is False:
        failed["held-out"] = "the policy did not pass its promotion gate"
    if _made_now(summary, "quantize"):
        for name, facts in sorted(table(summary, "quant").items()):
            if dig(facts, "ships") is False:
                failed[name] = f"does not ship: {dig(facts, 'why') or 'see the report'}"
    reward = table(summary, "rl", "reward_gate")
    if _made_now(summary, "rl") and reward.get("failed"):
        codes = ", ".join(f"{code} {n}×" for code, n in sorted(table(reward, "codes").items()))
        failed["rewards"] = f"{reward['failed']} of {reward.get('cycles')} cycles failed: {codes}"
    if not failed:
        return None
    profile = summary.get("profile")
    return Alert(
        "gate",
        f"rl-pipeline {profile}: gates failed ({', '.join(failed)})",
        "\n".join(f"{name}: {why}" for name, why in failed.items()) + _foot(summary),
        f"gate:{profile}:{','.join(failed)}",
    )


def _cost_alert(config: AlertsConfig, summary: dict[str, Any]) -> Alert | None:
    usd = dig(summary, "cost", "usd")
    limit = config.max_run_usd
    if limit is None or not isinstance(usd, int | float) or usd <= limit:
        return None
    if not _made_now(summary, "rl"):
        return None
    profile = summary.get("profile")
    return Alert(
        "cost",
        f"rl-pipeline {profile}: RL cost ${usd:,.4g}, over alerts.max_run_usd=${limit:,.4g}",
        f"{dig(summary, 'cost', 'device_s') or 0:.0f} device-seconds at "
        f"${dig(summary, 'cost', 'usd_per_device_hour')}/h{_foot(summary)}",
        f"cost:{profile}",
    )
