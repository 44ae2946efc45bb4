"""What a person does with releases: promote, roll back, approve, reject. Each is a ledger entry."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.promotion.releases import (
    ReleaseRefusedError,
    choose_ledger,
    find_release,
    verify_release,
)
from flows.promotion.rules import objection
from tasks.tracking.promotion_ledger import Entry, LedgerEntryError, PromotionLedger, Release


class ApprovalError(ValueError):
    """There is nothing to approve, or no longer."""


@dataclass(frozen=True)
class Act:
    """An entry a person made, and the ledger it went to."""

    entry: Entry
    ledger: PromotionLedger


def promote(
    runs_dir: Path,
    name: str,
    *,
    force: bool = False,
    reason: str | None = None,
    model: str | None = None,
) -> Act:
    """Make a release the champion.

    Args:
        runs_dir: folder of runs.
        name: run, version or hash; see `find_release`.
        force: although a gate failed or the champion was not met; then `reason` must be given.
        reason: goes to the ledger.
        model: which ledger a bare version is looked up in.

    Raises:
        NoReleaseError: no such release.
        ReleaseRefusedError: its bundle does not verify, or something speaks against it.
        LedgerError: it is the champion already, or the ledger cannot be relied on.
    """
    if force and not (reason or "").strip():
        raise ReleaseRefusedError(
            "--force needs --reason: the ledger says why rules were put aside"
        )
    release = find_release(runs_dir, name, model)
    ledger = PromotionLedger(runs_dir, release.model)
    ledger.recover()
    state = ledger.state()
    verify_release(release, runs_dir)
    against = objection(state, release)
    if against is not None and not force:
        raise ReleaseRefusedError(
            f"{_label(release)} is not promoted: {against}. All the same: "
            f"rl-pipeline promote {name} --force --reason '…'"
        )
    entry = ledger.append(
        "promote",
        release,
        reason=reason or "promoted by hand",
        evidence={"forced": force, "objection": against},
        over=state.champion,
    )
    return Act(entry, ledger)


def rollback(runs_dir: Path, *, reason: str | None = None, model: str | None = None) -> Act:
    """Return to the previous champion.

    Raises:
        LedgerEntryError: there is no previous one (a second rollback, or the first champion).
        ReleaseRefusedError: the previous bundle does not verify any more.
        NoReleaseError: no ledger, or several and none named.
    """
    ledger = choose_ledger(runs_dir, model)
    ledger.recover()
    state = ledger.state()
    if state.previous is None:
        raise LedgerEntryError(
            f"{ledger.model}: there is no previous release to return to; "
            + (
                "nothing was promoted yet"
                if state.champion is None
                else "only one rollback follows a promotion. Choose a version from rl-pipeline "
                f"history --model {ledger.model} and promote it: rl-pipeline promote "
                f"{ledger.model}:N --reason '…'"
            ),
            str(ledger.path),
        )
    verify_release(state.previous, runs_dir)
    left = state.champion.name if state.champion else "nobody"
    entry = ledger.append(
        "rollback",
        state.previous,
        reason=reason or "rolled back by hand",
        evidence={"left": left},
        over=state.champion,
    )
    return Act(entry, ledger)


def approve(
    runs_dir: Path,
    name: str,
    *,
    reject: bool = False,
    reason: str | None = None,
    model: str | None = None,
) -> Act:
    """Say yes or no to a release that waits for approval.

    Raises:
        ApprovalError: it does not wait, too late, or the champion it met is no longer there.
        ReleaseRefusedError: its bundle does not verify.
        NoReleaseError: no such release.
    """
    release = find_release(runs_dir, name, model)
    ledger = PromotionLedger(runs_dir, release.model)
    ledger.recover()
    waiting_entry(ledger, release.bundle_sha256)
    if not reject:
        verify_release(release, runs_dir)
    entry = settle_waiting(
        ledger,
        release.bundle_sha256,
        approve=not reject,
        reason=reason or ("rejected by hand" if reject else "approved by hand"),
    )
    return Act(entry, ledger)


def waiting_entry(ledger: PromotionLedger, bundle_sha256: str) -> Entry:
    """The entry that waits for approval.

    Raises:
        ApprovalError: there is none, it expired, or the champion has changed since.
    """
    state = ledger.state()
    entry = state.latest.get(bundle_sha256)
    if entry is None:
        raise ApprovalError(
            "this run's release is not in the ledger; it does not wait for approval"
        )
    name = f"{ledger.model}:{entry.release.version}"
    if entry.action != "candidate" or entry.evidence.get("waiting") is not True:
        is_champion = state.champion is not None and state.champion.bundle_sha256 == bundle_sha256
        todo = "it is the champion" if is_champion else f"to serve it: rl-pipeline promote {name}"
        raise ApprovalError(
            f"{name} does not wait for approval: last entry {entry.action} by {entry.actor} "
            f"({entry.reason}); {todo}"
        )
    if expired(entry):
        raise ApprovalError(
            f"the time to approve {name} ended at {entry.evidence.get('approve_by')} "
            "(promotion.approval_timeout_s); it stays a candidate: rl-pipeline promote "
            f"{name} --reason '…'"
        )
    champion = state.champion.bundle_sha256 if state.champion else None
    if entry.evidence.get("champion") != champion:
        now = state.champion.name if state.champion else "nobody"
        raise ApprovalError(
            f"{name} was compared with another champion than {now}, the one of now; run its "
            "profile again, which compares them, and approve then"
        )
    return entry


def expired(entry: Entry) -> bool:
    """Whether the time for an approval has passed."""
    until = entry.evidence.get("approve_by")
    return not isinstance(until, str) or datetime.now(UTC) > datetime.fromisoformat(until)


def settle_waiting(
    ledger: PromotionLedger,
    bundle_sha256: str,
    *,
    approve: bool,
    reason: str,
    actor: str | None = None,
) -> Entry:
    """Write a person's answer; an answer that is in the ledger already stands.

    Raises:
        ApprovalError: nothing waits.
    """
    latest = ledger.state().latest.get(bundle_sha256)
    if latest is not None and latest.action in ("approve", "reject"):
        return latest
    entry = waiting_entry(ledger, bundle_sha256)
    facts: Mapping[str, Any] = {"answers": entry.sequence}
    return ledger.append(
        "approve" if approve else "reject",
        entry.release,
        reason=reason,
        actor=actor,
        evidence=facts,
        over=ledger.state().champion,
    )


def _label(release: Release) -> str:
    return release.name if release.version else f"the bundle of run {release.run_id}"
