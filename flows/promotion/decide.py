"""After packaging: does the candidate become the champion? Decides, writes it down, makes it known.

The ledger comes first; MLflow's aliases, the alert and the deployment follow from it.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect.runtime import deployment as prefect_deployment
from prefect.runtime import flow_run

from configs.schema import PipelineConfig
from flows.alerts.send import send_alert
from flows.promotion.acts import expired
from flows.promotion.news import promotion_alert
from flows.promotion.releases import ReleaseRefusedError, follow, make_release, verify_release
from flows.promotion.rules import (
    Judgement,
    Outcome,
    gate_failures,
    held_back,
    judge_challenge,
)
from flows.run import Run
from tasks.artifacts import ArtifactRecord
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.challenge_champion import challenge_champion
from tasks.events import Event
from tasks.stages import STAGES
from tasks.tracking.promotion_ledger import (
    Entry,
    LedgerMovedError,
    LedgerState,
    PromotionLedger,
    Release,
)

MOST_TRIES = 3
"""How often a decision is taken anew because somebody moved the champion meanwhile."""


@dataclass(frozen=True)
class PromotionDecision:
    """What was decided of one packaged release."""

    outcome: Outcome
    reason: str
    release: Release
    """With the version the ledger gave it."""
    entry: Entry | None
    """The ledger's newest entry about it; None where there is none."""
    new: bool
    """Whether this run wrote that entry."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in `summary.json`."""
        release = self.release
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "model": release.model,
            "version": release.version or None,
            "bundle_sha256": release.bundle_sha256,
            "sequence": self.entry.sequence if self.entry else None,
            "evidence": dict(self.entry.evidence) if self.entry else {},
        }


def decide_promotion(run: Run) -> PromotionDecision:
    """Judge the packaged release and write the outcome to the ledger, the summary and MLflow.

    Raises:
        LedgerError: the ledger cannot be relied on.
        StageFailedError: the comparison with the champion ended without a result.
    """
    context = run.context
    release = make_release(context.config.profile, context.run_id, _records(run))
    ledger = PromotionLedger(context.runs_dir, release.model)
    for attempt in range(MOST_TRIES):
        try:
            decision = _decide(run, ledger, release)
            break
        except LedgerMovedError:
            if attempt == MOST_TRIES - 1:
                raise
    context.promotion = decision.to_json()
    context.promotion["aliases"] = "moved" if follow(context, ledger) else "pending"
    _tell(run, decision)
    return decision


def _records(run: Run) -> dict[str, ArtifactRecord]:
    """Records of the pipeline's own stages."""
    return {name: record for name, record in run.context.records().items() if name in STAGES}


def _decide(run: Run, ledger: PromotionLedger, release: Release) -> PromotionDecision:
    """Judge against the champion of now, and append what follows."""
    config, state = run.context.config, ledger.state()
    champion, latest = state.champion, state.latest.get(release.bundle_sha256)
    if champion is not None and champion.bundle_sha256 == release.bundle_sha256:
        reason = f"{champion.name} is the champion already"
        return PromotionDecision("champion already", reason, champion, latest, False)
    if (why := held_back(state, release)) is not None and latest is not None:
        return PromotionDecision("candidate", why, latest.release, latest, False)
    judged = judge(run, state, release)
    waits = judged.passed and config.promotion.approval
    evidence = {**judged.evidence, "passed": judged.passed, "waiting": waits}
    reason = f"waits for approval: {judged.reason}" if waits else judged.reason
    outcome: Outcome = "waiting" if waits else "promoted" if judged.passed else "candidate"
    if latest is not None and _says_the_same(latest, outcome, reason):
        return PromotionDecision(outcome, reason, latest.release, latest, False)
    if waits:
        evidence |= _approval_facts(config)
    entry = ledger.append(
        "promote" if outcome == "promoted" else "candidate",
        release,
        reason=reason[:2000],
        evidence=evidence,
        over=champion,
    )
    return PromotionDecision(outcome, reason, entry.release, entry, True)


def _says_the_same(latest: Entry, outcome: Outcome, reason: str) -> bool:
    """Whether a run repeated without any change would only write the same line again."""
    if outcome == "promoted" or latest.action != "candidate" or latest.reason != reason:
        return False
    return outcome == "candidate" or not expired(latest)


def _approval_facts(config: PipelineConfig) -> dict[str, Any]:
    """Until when a person may approve, and the flow run that waits for it, if one does."""
    until = datetime.now(UTC) + timedelta(seconds=config.promotion.approval_timeout_s)
    waiting = flow_run.get_id() if prefect_deployment.get_id() is not None else None
    return {"approve_by": until.isoformat(timespec="seconds"), "flow_run_id": waiting}


def judge(run: Run, state: LedgerState, release: Release) -> Judgement:
    """Gates first, then the bundle, then the champion."""
    champion = state.champion
    met = {"champion": champion.bundle_sha256 if champion else None}
    if failures := gate_failures(release.records):
        return Judgement(False, "; ".join(failures), met)
    try:
        verify_release(release, run.context.runs_dir)
    except ReleaseRefusedError as error:
        return Judgement(False, str(error), met)
    if champion is None:
        return Judgement(True, "no gate failed, and there is no champion to beat", met)
    return _challenge(run, release, champion)


def _challenge(run: Run, release: Release, champion: Release) -> Judgement:
    """Let both shipped files answer the same problems, or take the answers they gave before."""
    from tasks.evaluation.challenge import RESULT, ChallengeError, served_model

    package, policy = champion.records.get("package"), champion.records.get("rl")
    try:
        if package is None or policy is None:
            raise ChallengeError("its records are not in the ledger")
        served_model(package, policy.path / "policy")
    except ChallengeError as error:
        return Judgement(
            False,
            f"{champion.name}, the champion, cannot be scored: {error}. Bring its files back, or "
            "decide without it: rl-pipeline promote --force --reason '…'",
            {"champion": champion.bundle_sha256},
        )
    record = run.stage(
        "challenge",
        challenge_champion,
        data=release.records["data"],
        rl=release.records["rl"],
        package=release.records["package"],
        champion_rl=policy,
        champion_package=package,
    )
    path = record.path / RESULT
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactCorruptError(f"{path} cannot be read: {error}; run again", path) from error
    judged = judge_challenge(result, champion, run.context.config.promotion.margin)
    where = {"uri": record.uri, "sha256": record.sha256}
    return Judgement(judged.passed, judged.reason, {**judged.evidence, "challenge": where})


def _tell(run: Run, decision: PromotionDecision) -> None:
    """Warn in the run where it is not promoted; alert once, when something new was decided."""
    context = run.context
    name = decision.release.name
    if decision.outcome in ("candidate", "waiting"):
        context.tell(Event("warning", "promotion", f"{name} {decision.outcome}: {decision.reason}"))
    if decision.new and decision.entry is not None:
        alert = promotion_alert(decision.entry)
        outcome = send_alert(context.config.alerts, alert, context.runs_dir)
        for problem in outcome.problems:
            context.tell(Event("warning", "promotion", problem))
