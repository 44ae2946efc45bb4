"""The ledger over real files: chain, torn lines, tampering, two writers, and a state machine."""

import json
import pickle
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.artifacts import hash_json
from tasks.artifacts.atomic import dump_json
from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.provenance import module_environment
from tasks.tracking.promotion_ledger import (
    LedgerCorruptError,
    LedgerEntryError,
    LedgerFormatError,
    LedgerMovedError,
    LedgerTornError,
    PromotionLedger,
    Release,
    ledgers,
    model_name,
)


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
    state = ledger.state()
    return tuple(r and r.name for r in (state.champion, state.previous))


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


def test_any_changed_byte_is_found_and_its_line_named(three):
    raw = three.path.read_bytes()
    line = 1
    for position, byte in enumerate(raw):
        changed = bytearray(raw)
        changed[position] ^= (0x01, 0x20, 0x80)[position % 3]
        three.path.write_bytes(changed)
        with pytest.raises((LedgerCorruptError, LedgerFormatError)) as caught:
            three.verify()
        assert caught.value.line == line, (position, chr(byte))
        assert f"line {line}" in str(caught.value)
        with pytest.raises((LedgerCorruptError, LedgerFormatError)):
            three.champion()  # nobody acts on a changed ledger
        line += byte == ord("\n")
    three.path.write_bytes(raw)
    assert three.verify() == 3


def test_lines_taken_out_put_in_or_swapped_are_found(three):
    first, second, third = three.path.read_bytes().splitlines(keepends=True)
    for lines, line in (
        ([first, third], 2),
        ([second, third], 1),
        ([first, second], 3),
        ([first, first, second, third], 2),
        ([first, third, second], 2),
        ([], 1),
    ):
        three.path.write_bytes(b"".join(lines))
        with pytest.raises(LedgerCorruptError) as caught:
            three.verify()
        assert caught.value.line == line


def test_a_line_resealed_by_hand_breaks_the_one_after_it_and_the_head(three):
    lines = three.path.read_bytes().splitlines(keepends=True)
    for index, line in ((1, 3), (2, 3)):
        body = json.loads(lines[index])
        body["reason"] = "nothing to see here"
        del body["hash"]
        body["hash"] = hash_json(body)
        forged = [*lines]
        forged[index] = (dump_json(body) + "\n").encode()
        three.path.write_bytes(b"".join(forged))
        with pytest.raises(LedgerCorruptError) as caught:
            three.verify()
        assert caught.value.line == line


def test_the_same_values_written_another_way_are_not_the_line(three):
    raw = three.path.read_bytes()
    for old, new in (
        (b'"calc"', b'"\\u0063alc"'),
        (b'"sequence":2', b'"sequence": 2'),
        (b'"sequence":2', b'"sequence":1,"sequence":2'),
        (b'"evidence":{}', b'"evidence":{ }'),
    ):
        assert old in raw
        where = raw.index(b'"sequence":2') if b"2" in old else 0
        three.path.write_bytes(raw[:where] + raw[where:].replace(old, new, 1))
        with pytest.raises(LedgerCorruptError, match="differs from what was written"):
            three.verify()


def test_a_lost_file_is_not_an_empty_ledger(three):
    three.path.unlink()
    with pytest.raises(LedgerCorruptError, match="line 1 is missing"):
        three.champion()
    with pytest.raises(LedgerCorruptError):
        three.append("promote", release(9), reason="as if nothing had been")


def test_a_broken_head_is_named(three):
    three.head_path.write_text("{}")
    with pytest.raises(LedgerCorruptError, match=r"calc\.head\.json is unreadable"):
        three.verify()


def test_crash_while_appending_at_every_byte(three):
    """What a kill can leave of an unacknowledged line: any prefix of it, the head still old."""
    raw = three.path.read_bytes()
    start = raw.rindex(b"\n", 0, -1) + 1
    two = json.loads(raw.splitlines()[1])
    old_head = dump_json({"sequence": 2, "hash": two["hash"]})
    for end in [start, start + 1, *range(start + 2, len(raw), 17), len(raw) - 2, len(raw) - 1]:
        three.path.write_bytes(raw[:end])
        three.head_path.write_text(old_head)
        assert names(three) == ("calc v2", "calc v1")
        if end == start:
            assert three.verify() == 2
            continue
        with pytest.raises(LedgerTornError) as caught:
            three.verify()
        assert caught.value.line == 3
        aside = three.recover()
        assert aside.read_bytes() == raw[start:end]
        assert three.verify() == 2
        assert three.path.read_bytes() == raw[:start]
        aside.unlink()
    three.path.write_bytes(raw[:-20])
    three.append("candidate", release(4), reason="goes on after the crash")
    assert three.verify() == 3
    assert [e.release.bundle_sha256 for e in three.entries()][-1] == release(4).bundle_sha256
    (aside,) = three.path.parent.glob("*.torn-*")
    assert aside.read_bytes() == raw[start:-20]


def test_a_cut_line_that_was_acknowledged_is_no_crash(three):
    three.path.write_bytes(three.path.read_bytes()[:-1])
    with pytest.raises(LedgerCorruptError, match="line 3 is missing or cut short"):
        three.recover()


def test_crash_between_line_and_head_keeps_the_line(three):
    body = json.loads(three.path.read_bytes().splitlines()[1])
    three.head_path.write_text(dump_json({"sequence": 2, "hash": body["hash"]}))
    assert three.verify() == 3
    assert three.recover() is None
    assert json.loads(three.head_path.read_bytes())["sequence"] == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"champion": "v1", "date": "2024-01-01"}', "format none"),
        (None, "format 2.*newer version"),
    ],
)
def test_another_format_says_what_to_do(ledger, line, said):
    ledger.path.parent.mkdir(parents=True)
    if line is None:
        body = {"format": 2, "sequence": 1, "what": "ever"}
        line = dump_json({**body, "hash": hash_json(body)})
    ledger.path.write_text(line + "\n")
    with pytest.raises(LedgerFormatError, match=said) as caught:
        ledger.recover()
    assert caught.value.line == 1
    assert ("newer" in said) or "rl-pipeline promote" in str(caught.value)


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


def test_errors_cross_process_borders(three):
    three.path.write_bytes(b"x" + three.path.read_bytes()[1:])
    with pytest.raises(LedgerCorruptError) as caught:
        three.verify()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.line, copy.path) == (str(caught.value), 1, str(three.path))


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
