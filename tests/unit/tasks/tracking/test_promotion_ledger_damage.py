"""What crashes and hands leave of a ledger: found, named by its line, and never acted on."""

import json
import pickle

import pytest
from ledger_parts import ledger, names, release, three

from tasks.artifacts import hash_json
from tasks.artifacts.atomic import dump_json
from tasks.tracking.promotion_ledger import (
    LedgerCorruptError,
    LedgerFormatError,
    LedgerTornError,
)

__all__ = ["ledger", "three"]


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


def test_errors_cross_process_borders(three):
    three.path.write_bytes(b"x" + three.path.read_bytes()[1:])
    with pytest.raises(LedgerCorruptError) as caught:
        three.verify()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.line, copy.path) == (str(caught.value), 1, str(three.path))
