import json
import os
import stat
import subprocess
import sys
import threading

import pytest

from deployment.jetson.on_device.field_log import FILES, MAX_ROW_BYTES, FieldLog

MESSAGES = [{"role": "user", "content": "Grüße 日本語"}]


def _row(**changes):
    row = {
        "time": 1.5,
        "messages": MESSAGES,
        "answer": "5",
        "latency_s": 0.25,
        "error": None,
        "release": "a" * 64,
        "opted_in": True,
    }
    return {**row, **changes}


def _log(folder, max_bytes=1 << 20, max_rows=800, **options):
    return FieldLog(folder, "agent", max_bytes=max_bytes, max_rows=max_rows, **options)


def _rows(folder):
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_off_writes_nothing(tmp_path):
    log = FieldLog(None, "agent", max_bytes=1, max_rows=1)
    assert not log.enabled
    assert log.add(_row()) is False


def test_row_is_kept_as_documented_and_private_to_its_owner(tmp_path):
    folder = tmp_path / "a" / "field"
    log = _log(folder)
    assert log.add(_row())
    log.close()
    assert _rows(folder) == [{**_row(), "cut": False}]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (path,) = folder.iterdir()
    assert (path.name, stat.S_IMODE(path.stat().st_mode)) == ("agent-000001.jsonl", 0o600)


def test_texts_of_who_did_not_opt_in_are_not_kept(tmp_path):
    log = _log(tmp_path)
    log.add(_row(opted_in=False, error="timeout"))
    log.close()
    (row,) = _rows(tmp_path)
    assert (row["messages"], row["answer"], row["opted_in"]) == (None, None, False)
    assert (row["latency_s"], row["error"]) == (0.25, "timeout")
    kept = _log(tmp_path / "b", keep_private_text=True)
    kept.add(_row(opted_in=False))
    kept.close()
    (row,) = _rows(tmp_path / "b")
    assert (row["messages"], row["opted_in"]) == (MESSAGES, False)


@pytest.mark.parametrize(
    ("opt_in", "header", "right"),
    [
        (False, None, False),
        (True, None, True),
        (False, "opt-in", True),
        (True, "opt-out", False),
        (False, " Opt-In ", True),
        (True, "yes", None),
        (True, "", None),
    ],
)
def test_the_client_has_the_last_word(tmp_path, opt_in, header, right):
    assert _log(tmp_path, opt_in=opt_in).wish(header) is right


@pytest.mark.parametrize("max_rows", [1, 3, 8, 50])
def test_rows_are_bounded_and_the_oldest_go(tmp_path, max_rows):
    log = _log(tmp_path, max_rows=max_rows)
    for number in range(200):
        assert log.add(_row(time=number))
        assert len(_rows(tmp_path)) <= max_rows
    times = [row["time"] for row in _rows(tmp_path)]
    assert times == list(range(200 - len(times), 200))
    assert len(times) >= max(1, max_rows * 3 // 4 - 1)


def test_bytes_are_bounded(tmp_path):
    log = _log(tmp_path, max_bytes=20_000)
    for number in range(300):
        log.add(_row(time=number, answer="x" * (number % 500)))
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 20_000
    assert _rows(tmp_path)[-1]["time"] == 299


def test_smaller_bounds_hold_for_files_of_an_earlier_run(tmp_path):
    first = _log(tmp_path)
    for number in range(100):
        first.add(_row(time=number))
    first.close()
    second = _log(tmp_path, max_rows=10)
    second.add(_row(time=100))
    assert len(_rows(tmp_path)) <= 10


@pytest.mark.parametrize("max_bytes", [1 << 20, 8 * 4096])
def test_long_texts_are_left_out_and_the_row_says_so(tmp_path, max_bytes):
    log = _log(tmp_path, max_bytes=max_bytes)
    assert log.add(_row(answer="x" * MAX_ROW_BYTES))
    log.close()
    (row,) = _rows(tmp_path)
    assert (row["cut"], row["messages"], row["answer"]) == (True, None, None)


def test_row_that_no_file_can_hold_is_refused(tmp_path, caplog):
    assert _log(tmp_path, max_bytes=FILES * 10).add(_row()) is False
    assert "was not kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_odd_texts_stay_one_line_each(tmp_path):
    log = _log(tmp_path)
    texts = ["a\nb\r\u2028c", "\ud800", "\x00\x1b[31m", "", "é" * 10]
    for text in texts:
        assert log.add(_row(answer=text))
    log.close()
    assert [row["answer"] for row in _rows(tmp_path)] == texts


def test_a_new_run_never_goes_on_with_a_torn_file(tmp_path):
    first = _log(tmp_path)
    first.add(_row(time=1))
    first.close()
    with (tmp_path / "agent-000001.jsonl").open("ab") as file:
        file.write(b'{"time": 2, "mess')  # the power went
    second = _log(tmp_path)
    second.add(_row(time=3))
    second.close()
    assert [row["time"] for row in map(json.loads, _whole(tmp_path))] == [1, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "agent-000001.jsonl",
        "agent-000002.jsonl",
    ]


def _whole(folder):
    for path in sorted(folder.glob("*.jsonl")):
        yield from (line for line in path.read_text().splitlines() if line.endswith("}"))


def test_other_agents_files_are_left_alone(tmp_path):
    other = tmp_path / "agent-b-000001.jsonl"
    other.write_text("{}\n")
    (tmp_path / "agent-notes.jsonl").write_text("{}\n")
    log = _log(tmp_path, max_rows=1)
    for _ in range(5):
        log.add(_row())
    assert other.exists() and (tmp_path / "agent-notes.jsonl").exists()


def test_disk_that_refuses_is_told_once_a_row_and_does_not_raise(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = _log(tmp_path / "file" / "field")
    assert log.add(_row()) is False
    assert "a row was not kept: Not a directory" in caplog.text


def test_full_disk(tmp_path):
    """A real limit on file size: half a row is taken back, and when there is room it goes on."""
    code = (
        "import resource, signal, sys, pathlib\n"
        "from deployment.jetson.on_device.field_log import FieldLog\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "log = FieldLog(pathlib.Path(sys.argv[1]), 'agent', max_bytes=1 << 20, max_rows=99)\n"
        "row = dict(time=1, messages=None, answer='x' * 900, latency_s=0, error=None, release='r',"
        " opted_in=True)\n"
        "assert log.add(row)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))\n"
        "assert not log.add(row) and not log.add(row)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "assert log.add({**row, 'time': 2})\n"
        "print('alive')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n", done.stderr
    assert [row["time"] for row in _rows(tmp_path)] == [1, 2]


def test_many_restarts_do_not_make_many_files(tmp_path):
    for number in range(60):
        log = _log(tmp_path)
        log.add(_row(time=number))
        log.close()
    assert [row["time"] for row in _rows(tmp_path)] == list(range(60))
    assert len(list(tmp_path.iterdir())) == 1
    for number in range(60):  # every one of them ended by a power cut
        log = _log(tmp_path)
        log.add(_row(time=number))
        log.close()
        newest = max(tmp_path.iterdir())
        newest.write_bytes(newest.read_bytes() + b'{"torn')
    assert len(list(tmp_path.iterdir())) <= 32


def test_file_that_others_can_read_is_not_gone_on_with(tmp_path):
    log = _log(tmp_path)
    log.add(_row())
    log.close()
    (tmp_path / "agent-000001.jsonl").chmod(0o644)
    log.add(_row())
    log.close()
    assert stat.S_IMODE((tmp_path / "agent-000002.jsonl").stat().st_mode) == 0o600


def test_link_put_in_the_way_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "field"
    folder.mkdir()
    os.symlink(victim, folder / "agent-000001.jsonl")
    log = _log(folder)
    log.add(_row())
    log.close()
    assert victim.read_text() == "untouched"


def test_many_threads_write_whole_lines(tmp_path):
    log = _log(tmp_path, max_rows=10_000)
    threads = [
        threading.Thread(target=lambda: [log.add(_row()) for _ in range(20)]) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(_rows(tmp_path)) == 120
