"""The run's lock: one owner, who shows that it lives, and a message that names it."""

import json
import os
import subprocess
import sys
import time

import pytest

from flows.run_lock import RunLock, RunLockedError, lock_owner


def test_the_owner_shows_itself_again_and_again(tmp_path):
    with RunLock(tmp_path, "run-1", heartbeat_s=0.05):
        first = lock_owner(tmp_path)
        assert (first["run_id"], first["pid"], first["host"]) == (
            "run-1",
            os.getpid(),
            os.uname().nodename,
        )
        deadline_s = time.monotonic() + 10
        while lock_owner(tmp_path)["heartbeat"] == first["heartbeat"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        later = lock_owner(tmp_path)
        assert float(later["heartbeat"]) > float(first["heartbeat"])
        assert later["since"] == first["since"]
    assert (tmp_path / "run.lock").read_text() == ""
    assert lock_owner(tmp_path) == {}


def test_every_reading_of_the_lock_is_whole(tmp_path):
    with RunLock(tmp_path, "run-1", heartbeat_s=0.001):
        for _ in range(2000):
            assert json.loads((tmp_path / "run.lock").read_text())["run_id"] == "run-1"


def test_a_second_run_is_told_who_holds_it_and_since_when(tmp_path):
    with RunLock(tmp_path, "run-1"), pytest.raises(RunLockedError) as caught:
        RunLock(tmp_path, "run-2").acquire()
    assert f"run run-1 (process {os.getpid()}) uses" in str(caught.value)
    assert "(last seen 0 s ago)" in str(caught.value)


def test_an_acquired_lock_is_let_go_by_the_with_block(tmp_path):
    lock = RunLock(tmp_path, "run-1").acquire()
    with lock:
        assert lock_owner(tmp_path)["run_id"] == "run-1"
    with RunLock(tmp_path, "run-2"):
        assert lock_owner(tmp_path)["run_id"] == "run-2"


HOLDER = """
import sys, time
from pathlib import Path
from flows.run_lock import RunLock
with RunLock(Path(sys.argv[1]), "killed"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a22_two_runs_never_write_one_folder_and_a_killed_owner_frees_it(tmp_path):
    """Whatever the scheduler does: the second process is refused until the first is gone."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=f"run killed \\(process {holder.pid}\\)"):
            RunLock(tmp_path, "run-2").acquire()
    finally:
        holder.kill()
        holder.wait()
    assert lock_owner(tmp_path)["run_id"] == "killed"  # a dead owner's name stays
    with RunLock(tmp_path, "run-2"):
        assert lock_owner(tmp_path)["run_id"] == "run-2"
