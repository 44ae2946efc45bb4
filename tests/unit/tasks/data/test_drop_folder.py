"""The drop folder: what is new is decided by content, and nothing half-written is read."""

import json
import os

import pytest

from tasks.artifacts import hash_file
from tasks.data.drop_folder import (
    DropFolderError,
    IntakeGoneError,
    heldout_file,
    read_lines,
    row_key,
    take_in,
)


def row(i) -> str:
    return json.dumps({"prompt": f"What is {i} plus {i}?", "answer": str(2 * i)})


@pytest.fixture
def drop(tmp_path):
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def put(folder, name, *lines, end="\n"):
    (folder / name).write_text("\n".join(lines) + end, encoding="utf-8")


def texts(intake) -> list[str]:
    return [line.text for line in read_lines(intake.record)]


def left(intake) -> dict[str, str]:
    return {file.name: file.reason for file in intake.left}


def test_an_empty_folder_before_the_first_night_takes_nothing_in(drop, store):
    intake = take_in(drop, store)
    assert (intake.record, intake.new, intake.left) == (None, 0, ())
    assert take_in(None, store).record is None
    assert not store.exists()


def test_rows_are_taken_once_by_what_they_say(drop, store):
    put(drop, "b.jsonl", row(1), row(2))
    put(drop, "a.jsonl", row(3), row(1))
    first = take_in(drop, store)
    assert texts(first) == [row(3), row(1), row(2)]  # by file name; row 1 counts once
    assert (first.new, first.counts) == (3, {"a.jsonl": 2, "b.jsonl": 1})
    again = take_in(drop, store, head=first.record)
    assert (again.record, again.new) == (first.record, 0)
    # the same rows under another name, in another spelling, and one more
    (drop / "a.jsonl").unlink()
    (drop / "b.jsonl").unlink()
    spaced = '{ "answer": "2",  "prompt": "What is 1 plus 1?"}'
    put(drop, "c.jsonl", spaced, row(2), row(4))
    third = take_in(drop, store, head=first.record)
    assert (third.new, texts(third)) == (1, [row(3), row(1), row(2), row(4)])
    assert third.record.sha256 != first.record.sha256
    assert texts(first) == [row(3), row(1), row(2)]  # the older intake still stands


def test_the_same_content_gives_the_same_intake_and_a_killed_night_changes_nothing(drop, store):
    put(drop, "a.jsonl", row(1))
    first = take_in(drop, store)
    path = first.record.path / "rows.jsonl"
    stamp = path.stat().st_mtime_ns
    assert take_in(drop, store).record == first.record
    assert path.stat().st_mtime_ns == stamp  # left as it was
    # killed while it wrote: a half-made intake under the same name
    path.write_text("half")
    assert texts(take_in(drop, store)) == [row(1)]


def test_key_order_and_blanks_do_not_make_a_row_new_and_types_do():
    assert row_key('{"a": 1, "b": "x"}') == row_key('{"b":"x","a":1}')
    assert row_key('{"a": 1}') != row_key('{"a": "1"}')
    assert row_key('{"a": 1}') != row_key('{"a": true}')
    assert row_key("not json") == row_key("not json") != row_key("not  json")


def test_a_file_without_its_last_newline_waits_for_the_next_night(drop, store):
    put(drop, "growing.jsonl", row(1), row(2)[:20], end="")
    put(drop, "whole.jsonl", row(3))
    intake = take_in(drop, store)
    assert texts(intake) == [row(3)]
    assert left(intake) == {"growing.jsonl": "no newline at its end, so half-written; next night"}
    put(drop, "growing.jsonl", row(1), row(2))
    later = take_in(drop, store, head=intake.record)
    assert texts(later) == [row(3), row(1), row(2)]
    assert later.left == ()


def test_a_file_that_changes_while_it_is_read_is_left(drop, store, monkeypatch):
    put(drop, "a.jsonl", row(1))
    from pathlib import Path

    read_bytes = Path.read_bytes

    def read_while_written(path):
        data = read_bytes(path)
        if path.name == "a.jsonl":
            put(drop, "a.jsonl", row(1), row(2))
        return data

    monkeypatch.setattr(Path, "read_bytes", read_while_written)
    intake = take_in(drop, store)
    assert intake.record is None
    assert left(intake) == {"a.jsonl": "being written while it was read; next night"}


def test_what_is_no_jsonl_file_is_named_and_left(drop, store):
    (drop / "notes.txt").write_text("hello\n")
    (drop / "rows.jsonl.part").write_text(row(1) + "\n")
    (drop / ".hidden.jsonl").write_text(row(1) + "\n")
    (drop / "empty.jsonl").write_text("")
    (drop / "zip.jsonl").write_bytes(b"\x1f\x8b\x08rest\n")
    (drop / "wide.jsonl").write_bytes(row(1).encode("utf-16"))
    (drop / "folder.jsonl").mkdir()
    (drop / "gone.jsonl").symlink_to(drop / "nowhere")
    intake = take_in(drop, store)
    assert intake.record is None
    assert left(intake) == {
        "notes.txt": "not named .jsonl",
        "rows.jsonl.part": "its name says that it is still being written",
        "empty.jsonl": "empty",
        "zip.jsonl": "gzip-compressed; expected JSONL in UTF-8",
        "wide.jsonl": "UTF-16; expected JSONL in UTF-8",
        "folder.jsonl": "not a file; put JSONL files into the folder itself",
        "gone.jsonl": "not a file; put JSONL files into the folder itself",
    }


def test_lines_are_kept_as_they_stand_and_bad_bytes_are_said(drop, store):
    (drop / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf"
        + row(1).encode()
        + b"\r\n\n"
        + b'{"prompt": "\xff"}\n'
        + "{ü\u2028}\n".encode()
    )
    lines = read_lines(take_in(drop, store).record)
    assert [(found.line, found.problem) for found in lines] == [
        (1, ""),
        (3, "not UTF-8 (invalid start byte at byte 12)"),
        (4, ""),
    ]
    assert lines[0].text == row(1)
    assert lines[2].text == "{ü\u2028}"


def test_a_missing_folder_is_named_with_the_key(tmp_path, store):
    with pytest.raises(DropFolderError, match=r"nightly.drop_folder='.*none': No such file"):
        take_in(tmp_path / "none", store)
    (tmp_path / "file").write_text("")
    with pytest.raises(DropFolderError, match="Not a directory"):
        take_in(tmp_path / "file", store)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_left(drop, store):
    put(drop, "a.jsonl", row(1))
    (drop / "a.jsonl").chmod(0)
    assert left(take_in(drop, store)) == {"a.jsonl": "cannot be read: Permission denied"}


def test_the_heldout_set_is_frozen_once_byte_for_byte(drop, store, tmp_path):
    first_set, other_set = tmp_path / "heldout.jsonl", tmp_path / "other.jsonl"
    first_set.write_bytes(b'{"id": "h\xc3\xbc"}\n')
    other_set.write_bytes(b'{"id": "x"}\n')
    put(drop, "a.jsonl", row(1))
    one = take_in(drop, store)
    assert heldout_file(one.record) is None
    two = take_in(drop, store, head=one.record, heldout=first_set)
    assert (two.new, texts(two)) == (0, [row(1)])
    assert heldout_file(two.record).read_bytes() == first_set.read_bytes()
    put(drop, "b.jsonl", row(2))
    three = take_in(drop, store, head=two.record, heldout=other_set)
    assert hash_file(heldout_file(three.record)) == hash_file(first_set)


@pytest.mark.parametrize("name", ["rows.jsonl", "manifest.json", "heldout.jsonl"])
@pytest.mark.parametrize("fault", ["changed", "gone"])
def test_an_intake_that_is_not_whole_stops_the_night_and_says_what_to_do(
    drop, store, tmp_path, name, fault
):
    (tmp_path / "heldout.jsonl").write_text('{"id": "h"}\n')
    put(drop, "a.jsonl", row(1))
    intake = take_in(drop, store, heldout=tmp_path / "heldout.jsonl")
    path = intake.record.path / name
    if fault == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"1", b"2") + b" ")
    with pytest.raises(IntakeGoneError, match="backup of runs/store, or rename the profile"):
        take_in(drop, store, head=intake.record)
