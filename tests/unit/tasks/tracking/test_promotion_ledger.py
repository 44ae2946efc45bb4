"""The ledger over real files: chain, decisions, what is refused, writers at once, any acts."""

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_parts import ledger, names, release, three

from tasks.artifacts import hash_json
from tasks.artifacts.atomic import dump_json
from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.provenance import module_environment
from tasks.tracking.promotion_ledger import (
    LedgerEntryError,
    LedgerMovedError,
    PromotionLedger,
    ledgers,
    model_name,
)

__all__ = ["ledger", "three"]


def test_empty_ledger_has_nobody_and_verifies(ledger):
    assert ledger.champion() is None
    assert ledger.previous() is None
    assert ledger.entries() == []
    assert ledger.verify() == 0
    assert ledger.recover() is None
    assert not ledger.path.exists()  # looking makes nothing


def test_promote_candidate_and_rollback_fold_to_champion_and_previous(three):
    assert names(three) == ("calc v2", "calc v1")
    entry = three.append("rollback", three.previous(), reason="wrong units")
    assert entry.release.name == "calc v1"
    assert names(three) == ("calc v1", None)
    assert three.state().withdrawn == {release(2).bundle_sha256}
    with pytest.raises(LedgerEntryError, match=r"no previous release.*rl-pipeline history"):
        three.append("rollback", release(2), reason="again")
    three.append("promote", release(2), reason="it was right after all")
    assert names(three) == ("calc v2", "calc v1")
    assert three.state().withdrawn == frozenset()
    assert three.state().served == {release(1).bundle_sha256, release(2).bundle_sha256}
    assert three.verify() == 5


def test_versions_count_bundles_not_entries(three):
    again = three.append("candidate", release(3), reason="met v2 again")
    assert again.release.version == 3
    assert three.append("approve", release(4), reason="yes").release.version == 4
    assert [r.version for r in three.state().releases] == [1, 2, 3, 4]


def test_every_line_is_chained_by_its_own_bytes(three):
    lines = three.path.read_bytes().decode().splitlines()
    bodies = [json.loads(line) for line in lines]
    assert [b["sequence"] for b in bodies] == [1, 2, 3]
    assert bodies[0]["previous"] == "0" * 64
    for before, after in pairwise(bodies):
        assert after["previous"] == before["hash"]
    for body, line in zip(bodies, lines, strict=True):
        assert dump_json(body) == line
        own = body.pop("hash")
        assert hash_json(body) == own
    head = json.loads(three.head_path.read_bytes())
    assert head == {"sequence": 3, "hash": json.loads(lines[2])["hash"]}


def test_the_champion_cannot_be_promoted_again_or_made_a_candidate(three):
    for action in ("promote", "approve", "candidate", "reject"):
        with pytest.raises(LedgerEntryError, match="calc v2 is the champion already"):
            three.append(action, release(2), reason="again")
    with pytest.raises(LedgerEntryError, match="leads to calc v1, not to calc v3"):
        three.append("rollback", release(3), reason="elsewhere")
    assert three.verify() == 3


def test_a_decision_against_a_champion_that_moved_is_refused(three):
    with pytest.raises(LedgerMovedError, match="is now calc v2, not calc v1"):
        three.append("promote", release(3), reason="beats v1", over=release(1, version=1))
    with pytest.raises(LedgerMovedError, match="not nobody"):
        three.append("promote", release(3), reason="first", over=None)
    three.append("promote", release(3), reason="beats v2", over=three.champion())
    assert names(three) == ("calc v3", "calc v2")


@pytest.mark.parametrize("reason", ["", "   \n", "x" * 2001, "bad \udc80 surrogate"])
def test_a_reason_that_says_nothing_or_cannot_be_written_is_refused(ledger, reason):
    with pytest.raises(LedgerEntryError):
        ledger.append("promote", release(1), reason=reason)
    assert ledger.entries() == []


def test_hostile_text_survives_as_text(ledger):
    reason = "line\nbreak \x1b[31m\u202e\u2028 <script> \x00 😀"
    ledger.append("promote", release(1), reason=reason)
    assert ledger.entries()[0].reason == reason
    assert ledger.verify() == 1


def test_a21_a_figure_that_is_not_finite_cannot_enter_the_ledger(ledger):
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(LedgerEntryError, match="cannot be written"):
            ledger.append("promote", release(1), reason="r", evidence={"delta": [0.1, bad]})
    assert ledger.entries() == []
    assert ledger.verify() == 0


def test_one_ledger_has_one_profile(ledger):
    ledger.append("promote", release(1), reason="r")
    with pytest.raises(LedgerEntryError, match="rename one"):
        ledger.append("promote", release(2, profile="ca.lc"), reason="r")
    with pytest.raises(LedgerEntryError, match="in the ledger of calc"):
        ledger.append("promote", release(2, model="other"), reason="r")
    assert model_name("gsm8k_qwen2.5_0.5b") == "gsm8k_qwen2-5_0-5b"


def test_ledgers_lists_models_only(tmp_path, three):
    PromotionLedger(tmp_path, "abc").append("promote", release(1, model="abc"), reason="r")
    (three.path.parent / "calc.jsonl.torn-1").write_text("x")
    assert [found.model for found in ledgers(tmp_path)] == ["abc", "calc"]
    assert ledgers(tmp_path / "nowhere") == []


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    (tmp_path / "promotions").write_text("a file where the folder should be")
    with pytest.raises(ArtifactWriteError, match="cannot write"):
        PromotionLedger(tmp_path, "calc").append("promote", release(1), reason="r")


WRITER = """
import sys
from pathlib import Path
from tasks.tracking.promotion_ledger import PromotionLedger, Release
runs, first = Path(sys.argv[1]), int(sys.argv[2])
ledger = PromotionLedger(runs, "calc")
for n in range(first, first + 15):
    r = Release(model="calc", profile="calc", run_id=f"run-{n}", bundle_sha256=f"{n:064x}",
                bundle="b")
    ledger.append("candidate", r, reason=f"writer {first}")
"""


def test_writers_at_once_share_one_chain(tmp_path, ledger):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [
        subprocess.Popen([*command, str(first)], env=module_environment())
        for first in (100, 200, 300)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert ledger.verify() == 45
    assert sorted(r.version for r in ledger.state().releases) == list(range(1, 46))


class LedgerMachine(RuleBasedStateMachine):
    """Random acts and crashes against the obvious model: a champion, a previous, a list."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = PromotionLedger(Path(self.folder.name), "calc")
        self.champion = self.previous = None
        self.known = []
        self.count = 0

    def teardown(self):
        self.folder.cleanup()

    def _act(self, action, number):
        if number == self.champion:
            with pytest.raises(LedgerEntryError):
                self.ledger.append(action, release(number), reason="r")
            return False
        entry = self.ledger.append(action, release(number), reason="r")
        if number not in self.known:
            self.known.append(number)
        assert entry.release.version == self.known.index(number) + 1
        self.count += 1
        return True

    @rule(number=st.integers(1, 5), action=st.sampled_from(["promote", "approve"]))
    def promote(self, number, action):
        if self._act(action, number):
            self.champion, self.previous = number, self.champion

    @rule(number=st.integers(1, 5), action=st.sampled_from(["candidate", "reject"]))
    def judge(self, number, action):
        self._act(action, number)

    @precondition(lambda self: self.previous is not None)
    @rule()
    def rollback(self):
        self.ledger.append("rollback", self.ledger.previous(), reason="r")
        self.champion, self.previous = self.previous, None
        self.count += 1

    @precondition(lambda self: self.previous is None and self.known)
    @rule()
    def second_rollback(self):
        with pytest.raises(LedgerEntryError):
            self.ledger.append("rollback", release(self.known[0]), reason="r")

    @precondition(lambda self: self.known)
    @rule(text=st.binary(min_size=1, max_size=40).filter(lambda b: b"\n" not in b))
    def crash_half_way(self, text):
        with self.ledger.path.open("ab") as file:
            file.write(text)

    @rule()
    def restart(self):
        self.ledger = PromotionLedger(Path(self.folder.name), "calc")
        self.ledger.recover()
        assert self.ledger.verify() == self.count

    @invariant()
    def agrees(self):
        state = self.ledger.state()
        for found, number in ((state.champion, self.champion), (state.previous, self.previous)):
            assert (found and int(found.bundle_sha256, 16)) == number
        assert len(self.ledger.entries()) == self.count


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
