"""Promote, roll back, approve, reject, and finding what is meant: over real signed bundles."""

from datetime import UTC, datetime, timedelta

import pytest

from flows.promotion.acts import (
    ApprovalError,
    approve,
    promote,
    rollback,
    settle_waiting,
)
from flows.promotion.releases import (
    NoReleaseError,
    ReleaseRefusedError,
    config_of,
    find_release,
    ready_ledger,
    verify_release,
)
from tasks.artifacts import write_json
from tasks.tracking.promotion_ledger import (
    LedgerCorruptError,
    LedgerEntryError,
    LedgerFormatError,
    PromotionLedger,
    this_actor,
)
from tests.small_releases import write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs r1, r2, r3 of one profile; nothing is promoted."""
    monkeypatch.delenv("RL_PIPELINE_SIGNING_KEY", raising=False)
    folder = tmp_path / "runs"
    for name in ("r1", "r2", "r3"):
        write_run(folder, name)
    return folder


@pytest.fixture
def ledger(runs):
    """The ledger of these runs."""
    return PromotionLedger(runs, "calc")


def wait(ledger, runs, name, hours=1.0, **evidence):
    """Write the entry of a release that waits for approval."""
    champion = ledger.champion()
    until = datetime.now(UTC) + timedelta(hours=hours)
    facts = {
        "champion": champion and champion.bundle_sha256,
        "passed": True,
        "waiting": True,
        "approve_by": until.isoformat(timespec="seconds"),
        **evidence,
    }
    release = find_release(runs, name)
    return ledger.append("candidate", release, reason="waits for approval: good", evidence=facts)


def test_promote_twice_and_back(runs, ledger):
    first = promote(runs, "r1").entry
    assert (first.action, first.release.version, first.actor) == ("promote", 1, this_actor())
    assert first.reason == "promoted by hand"
    promote(runs, "r2", force=True, reason="compared by eye")
    assert ledger.champion().run_id == "r2"
    back = rollback(runs, reason="wrong units").entry
    assert (back.action, back.release.run_id) == ("rollback", "r1")
    assert back.evidence == {"left": "calc v2"}
    with pytest.raises(LedgerEntryError, match=r"only one rollback.*rl-pipeline promote calc:N"):
        rollback(runs)
    assert ledger.verify() == 3


def test_rollback_with_nothing_to_return_to(runs):
    with pytest.raises(NoReleaseError, match="nothing was packaged"):
        rollback(runs)
    promote(runs, "r1")
    with pytest.raises(LedgerEntryError, match="no previous release"):
        rollback(runs)


def test_force_needs_a_reason_and_both_are_in_the_ledger(runs, ledger):
    promote(runs, "r1")
    with pytest.raises(ReleaseRefusedError, match="--force needs --reason"):
        promote(runs, "r2", force=True)
    with pytest.raises(ReleaseRefusedError, match="--force needs --reason"):
        promote(runs, "r2", force=True, reason="  ")
    with pytest.raises(ReleaseRefusedError, match=r"not been compared with calc v1.*--force"):
        promote(runs, "r2")
    assert ledger.verify() == 1
    entry = promote(runs, "r2", force=True, reason="I know").entry
    assert entry.evidence["forced"] is True
    assert "not been compared" in entry.evidence["objection"]


def test_a_failed_gate_needs_force(runs):
    gate = find_release(runs, "r1").records["evaluation"].path / "summary.json"
    write_json(gate, {"gate": {"passed": False, "reasons": ["lower end is -0.2"]}})
    with pytest.raises(ReleaseRefusedError, match=r"evaluation gate failed: lower end is -0\.2"):
        promote(runs, "r1")
    assert promote(runs, "r1", force=True, reason="demo").entry.release.version == 1


def test_a_bundle_that_does_not_verify_is_never_put_into_service(runs, ledger):
    promote(runs, "r1")
    promote(runs, "r2", force=True, reason="x")
    model = runs / "store/package/r1/bundle/models/Q8_0.gguf"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1] + b"!")
    with pytest.raises(ReleaseRefusedError, match=r"Q8_0\.gguf was changed"):
        rollback(runs)
    with pytest.raises(ReleaseRefusedError, match="was changed"):
        promote(runs, "v1", force=True, reason="whatever")
    model.unlink()
    with pytest.raises(ReleaseRefusedError, match="an empty folder that nobody signed"):
        rollback(runs)
    assert ledger.champion().run_id == "r2"
    model.write_bytes(whole)
    assert rollback(runs).entry.release.run_id == "r1"


def test_another_bundle_in_the_same_place_is_not_the_release(runs, tmp_path):
    release = find_release(runs, "r1")
    other = write_run(tmp_path / "other", "r1", content="another")
    (tmp_path / "other/keys").rename(tmp_path / "spare")
    swapped = release.model_copy(update={"bundle": other.bundle})
    with pytest.raises(ReleaseRefusedError):
        verify_release(swapped, runs)  # signed by another key
    moved = release.model_copy(update={"bundle": find_release(runs, "r2").bundle})
    with pytest.raises(ReleaseRefusedError, match="holds another bundle"):
        verify_release(moved, runs)


def test_without_pinned_keys_nothing_is_promoted(runs):
    (runs / "keys" / "allowed_signers").unlink()
    with pytest.raises(ReleaseRefusedError, match="no pinned keys"):
        promote(runs, "r1")


def test_approve_and_reject(runs, ledger):
    wait(ledger, runs, "r1")
    entry = approve(runs, "r1", reason="reads well").entry
    assert (entry.action, entry.reason) == ("approve", "reads well")
    assert ledger.champion().run_id == "r1"
    with pytest.raises(ApprovalError, match="it is the champion"):
        approve(runs, "r1")
    wait(ledger, runs, "r2")
    assert approve(runs, "v2", reject=True).entry.action == "reject"
    assert ledger.champion().run_id == "r1"
    with pytest.raises(ApprovalError, match=r"last entry reject .*rl-pipeline promote calc:2"):
        approve(runs, "v2")


def test_only_what_waits_in_time_and_met_the_champion_of_now_is_approved(runs, ledger):
    with pytest.raises(ApprovalError, match="not in the ledger"):
        approve(runs, "r1")
    ledger.append("candidate", find_release(runs, "r1"), reason="worse", evidence={})
    with pytest.raises(ApprovalError, match="does not wait"):
        approve(runs, "r1")
    wait(ledger, runs, "r2", hours=-1)
    with pytest.raises(ApprovalError, match=r"ended at .*approval_timeout_s"):
        approve(runs, "r2")
    wait(ledger, runs, "r2", approve_by=None)
    with pytest.raises(ApprovalError, match="ended at None"):
        approve(runs, "r2")
    wait(ledger, runs, "r2")
    promote(runs, "r3")
    with pytest.raises(ApprovalError, match="another champion than calc v3"):
        approve(runs, "r2")
    assert ledger.champion().run_id == "r3"


def test_an_answer_that_stands_is_not_written_twice(runs, ledger):
    wait(ledger, runs, "r1")
    first = settle_waiting(
        ledger, find_release(runs, "r1").bundle_sha256, approve=False, reason="no", actor="ann@x"
    )
    again = settle_waiting(ledger, first.release.bundle_sha256, approve=True, reason="yes")
    assert again == first
    assert ledger.champion() is None


def test_names_of_releases(runs, ledger):
    sha256 = promote(runs, "r1").entry.release.bundle_sha256
    promote(runs, str(runs / "r2"), force=True, reason="x")
    (runs / "latest").symlink_to("r3")
    for name, run_id in {
        "v1": "r1",
        "1": "r1",
        "calc:2": "r2",
        "calc v2": "r2",
        sha256[:8]: "r1",
        sha256: "r1",
        "r2": "r2",
        "latest": "r3",
        str(runs / "latest"): "r3",
    }.items():
        assert find_release(runs, name).run_id == run_id, name
    assert find_release(runs, "r2").version == 2
    assert find_release(runs, "r3").version == 0  # the ledger does not have it
    for name in ("v9", "other:1", "nonsense", "", "../r1", sha256[:5]):
        with pytest.raises(NoReleaseError):
            find_release(runs, name)
    with pytest.raises(NoReleaseError, match=r"the newest are calc:1, calc:2"):
        find_release(runs, "v9")


def test_a_version_of_two_models_asks_which(runs):
    write_run(runs, "o1", profile="oth.er")
    promote(runs, "r1")
    promote(runs, "o1")
    with pytest.raises(NoReleaseError, match="calc:1, oth-er:1; name one"):
        find_release(runs, "v1")
    assert find_release(runs, "v1", model="oth.er").run_id == "o1"
    assert find_release(runs, "oth.er:1").run_id == "o1"
    with pytest.raises(NoReleaseError, match="ledgers of calc, oth-er; name one"):
        rollback(runs)


def test_unfinished_and_unreadable_runs_are_named(runs):
    (runs / "r1" / "config.json").unlink()
    with pytest.raises(NoReleaseError, match=r"config\.json is missing"):
        promote(runs, "r1")
    records = runs / "r2" / "records.json"
    write_json(records, {"data": {"kind": "dataset", "uri": "x", "sha256": "0"}})
    with pytest.raises(NoReleaseError, match="made no bundle"):
        promote(runs, "r2")
    records.write_text("[1")
    with pytest.raises(NoReleaseError, match="cannot be read"):
        promote(runs, "r2")


def test_the_ledger_is_looked_at_before_a_run_works(runs, ledger):
    assert ready_ledger(runs, "calc").entries() == []
    promote(runs, "r1")
    with ledger.path.open("ab") as file:
        file.write(b'{"half')
    assert ready_ledger(runs, "calc").verify() == 1
    raw = ledger.path.read_bytes()
    ledger.path.write_bytes(raw.replace(b"promoted", b"Promoted"))
    with pytest.raises(LedgerCorruptError, match="line 1"):
        ready_ledger(runs, "calc")
    with pytest.raises(LedgerCorruptError):
        promote(runs, "r2", force=True, reason="anyway")
    ledger.path.write_text('{"champion": "r0"}\n')
    with pytest.raises(LedgerFormatError, match="adopted from the old ledger"):
        ready_ledger(runs, "calc")


def test_settings_come_from_the_run_or_are_the_defaults(runs, tmp_path):
    release = write_run(runs, "r9", promotion={"margin": 0.25})
    assert config_of(release, runs).promotion.margin == 0.25
    assert config_of(release, tmp_path).promotion.margin == 0.0
