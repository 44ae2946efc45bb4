"""Ledgers to begin with, and what one says."""

import pytest

from tasks.tracking.promotion_ledger import PromotionLedger, Release


def release(number, model="calc", profile="calc", **more):
    """The release of bundle `number`."""
    return Release(
        model=model,
        profile=profile,
        run_id=f"run-{number}",
        bundle_sha256=f"{number:064x}",
        bundle=f"runs/store/package/{number}/bundle",
        **more,
    )


@pytest.fixture
def ledger(tmp_path):
    """An empty ledger."""
    return PromotionLedger(tmp_path, "calc")


@pytest.fixture
def three(ledger):
    """Promoted 1, promoted 2, 3 a candidate."""
    ledger.append("promote", release(1), reason="first")
    ledger.append("promote", release(2), reason="besser als v1 – ü")
    ledger.append("candidate", release(3), reason="0.1 worse", evidence={"delta": -0.1})
    return ledger


def names(ledger):
    """Champion and previous."""
    state = ledger.state()
    return tuple(r and r.name for r in (state.champion, state.previous))
