"""Append-only logs: torn lines, several writers, disks that refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.artifacts.append_log import locked_log, parse_log, read_log
from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.provenance import module_environment


def append(path: Path, **row: object) -> None:
    with locked_log(path) as log:
        log.append(row)


def test_lines_come_back_in_order_with_sorted_keys(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    append(path, b="é\u2028", a=1)
    append(path, a=2)
    assert path.read_text() == '{"a":1,"b":"é\u2028"}\n{"a":2}\n'
    assert read_log(path).rows == ({"a": 1, "b": "é\u2028"}, {"a": 2})
    assert read_log(tmp_path / "none.jsonl").rows == ()


def test_a_line_cut_off_by_a_kill_is_named_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append(path, a=1)
    with path.open("ab") as file:
        file.write(b'{"a": 2, "b": "\xc3')
    append(path, a=3)
    lines = read_log(path)
    assert lines.rows == ({"a": 1}, {"a": 3})
    assert lines.unreadable == (2,)


def test_what_is_no_object_is_unreadable() -> None:
    lines = parse_log(b'\n[1]\n{"a":1}\n  \nnull\n')
    assert (lines.rows, lines.unreadable) == (({"a": 1},), (2, 5))


def test_a_holder_sees_its_own_lines(tmp_path: Path) -> None:
    with locked_log(tmp_path / "log.jsonl") as log:
        assert log.lines().rows == ()
        log.append({"a": 1})
        assert log.lines().rows == ({"a": 1},)


def test_two_processes_never_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = (
        "import sys; from pathlib import Path; from tasks.artifacts.append_log import locked_log\n"
        "for i in range(50):\n"
        "    with locked_log(Path(sys.argv[1])) as log:\n"
        "        log.append({'who': sys.argv[2], 'i': len(log.lines().rows)})\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path), who], env=module_environment())
        for who in "ab"
    ]
    assert [w.wait(60) for w in writers] == [0, 0]
    assert [row["i"] for row in read_log(path).rows] == list(range(100))


def test_a_refusing_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(ArtifactWriteError, match=r"log\.jsonl"), locked_log(tmp_path / "log.jsonl"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_read_only_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("")
    path.chmod(0o444)
    with pytest.raises(ArtifactWriteError, match="writable"), locked_log(path):
        pass
