"""Process trees, with real processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tasks.process_tree import (
    TOKEN_VARIABLE,
    PeakSampler,
    descendants,
    end_marked,
    marked,
    tree_bytes,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def start(command, **options):
    """A process with our environment and a mark."""
    return subprocess.Popen(command, **options)


def wait_for(condition, timeout_s=10.0):
    """Poll until true; fails the test when it stays false."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition stayed false"
        time.sleep(0.02)


def test_marked_finds_a_run_and_its_stages_but_no_other_run():
    tokens = ["run-a", "run-a:rl", "run-ab", "run-b"]
    started = [start(SLEEP, env={**os.environ, TOKEN_VARIABLE: t}) for t in tokens]
    try:
        wait_for(lambda: len(marked("run-a")) == 2)
        assert {p.pid for p in marked("run-a")} == {started[0].pid, started[1].pid}
        assert {p.pid for p in marked("run-a:rl")} == {started[1].pid}
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_end_marked_kills_a_session_leader_that_ignores_sigterm():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    env = {**os.environ, TOKEN_VARIABLE: "dead-run:rl"}
    process = start([sys.executable, "-c", code], env=env, start_new_session=True)
    wait_for(lambda: marked("dead-run"))
    assert end_marked("dead-run") >= 1
    assert process.wait(timeout=5) == -signal.SIGKILL
    assert end_marked("dead-run") == 0


def test_tree_bytes_counts_children_and_skips_pss_under_the_floor():
    hungry = "x = bytearray(64 << 20); import time; print('ready', flush=True); time.sleep(60)"
    before = tree_bytes(os.getpid())
    child = start([sys.executable, "-c", hungry], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert tree_bytes(os.getpid()) - before > 60 << 20
        assert tree_bytes(os.getpid(), floor=1 << 50) >= tree_bytes(os.getpid())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_process_that_is_gone_has_no_bytes_and_no_descendants():
    process = start([sys.executable, "-c", ""])
    process.wait()
    assert tree_bytes(process.pid) == 0
    assert descendants(process.pid) == []


def test_peak_sampler_keeps_the_peak_after_the_memory_is_gone():
    with PeakSampler(period_s=0.02) as sampler:
        wait_for(lambda: sampler.peak_bytes > 0)
        low = sampler.peak_bytes
        block = bytearray(80 << 20)
        wait_for(lambda: sampler.peak_bytes > low + (60 << 20))
        peak = sampler.peak_bytes
        del block
        sampler.mark()
        assert sampler.peak_since_mark is None or sampler.peak_since_mark <= peak
        wait_for(lambda: sampler.peak_since_mark is not None)
        assert sampler.peak_bytes >= peak


def reaper(code, parent=None, grace="0.5", **options):
    """A command under the reaper."""
    command = [sys.executable, "-m", "tasks.reaper", str(parent or os.getpid()), grace]
    return start([*command, sys.executable, "-c", code], **options)


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(7)", 7)])
def test_reaper_passes_the_exit_code_on(code, expected):
    assert reaper(code).wait(timeout=20) == expected


def test_reaper_turns_a_signal_into_128_plus_its_number():
    code = "import os; os.kill(os.getpid(), 9)"
    assert reaper(code).wait(timeout=20) == 128 + signal.SIGKILL


GRANDCHILD = (
    "import subprocess, sys, time\n"
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True)\n"
    "print(c.pid, flush=True)\n"
)


def test_reaper_ends_a_grandchild_in_its_own_session_when_the_command_succeeds():
    process = reaper(GRANDCHILD, stdout=subprocess.PIPE)
    grandchild = int(process.stdout.readline())
    assert process.wait(timeout=20) == 0
    process.stdout.close()
    assert not psutil.pid_exists(grandchild)


def test_reaper_ends_everything_on_sigterm_though_the_command_ignores_it():
    code = GRANDCHILD + "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint(1)\ntime.sleep(60)"
    process = reaper(code, stdout=subprocess.PIPE)
    grandchild = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    process.stdout.close()
    assert not psutil.pid_exists(grandchild)


def test_reaper_ends_everything_when_its_parent_is_killed():
    middle = (
        "import os, subprocess, sys\n"
        "r = subprocess.Popen([sys.executable, '-m', 'tasks.reaper', str(os.getpid()), '0.2',"
        " sys.executable, '-c', sys.argv[1]])\n"
        "r.wait()\n"
    )
    code = GRANDCHILD + "time.sleep(60)"
    parent = start([sys.executable, "-c", middle, code], stdout=subprocess.PIPE)
    grandchild = int(parent.stdout.readline())
    tree = [p.pid for p in descendants(parent.pid)]
    assert grandchild in tree
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(_runs(pid) for pid in tree))


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
