"""One service's process tree: started detached, found, ended whole. The service is a small one."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from deployment.service_files import read_state, running, state_path
from flows.services.process import (
    PortTakenError,
    ServicesBusyError,
    log_path,
    refuse_taken_port,
    services_lock,
    start_service,
    stop_service,
    tree_facts,
)
from flows.services.specs import ServiceSpec, service_token
from tasks.artifacts.provenance import module_environment
from tasks.process_tree import TOKEN_VARIABLE, marked

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print("ready", flush=True)
time.sleep(300)
"""


@pytest.fixture
def service(tmp_path):
    """A service that ignores SIGTERM and has a child in a session of its own."""
    token = {TOKEN_VARIABLE: service_token(tmp_path, "worker")}
    environment = {**module_environment(), **token}
    command = (sys.executable, "-c", STUBBORN)
    spec = ServiceSpec("worker", command, environment, "http://h/api", None, 0.3)
    yield spec
    stop_service("worker", tmp_path, 0.3)
    assert marked(service_token(tmp_path, "worker")) == []


def wait_ready(tmp_path):
    """Return when the service has printed its line."""
    deadline_s = time.monotonic() + 30
    while "ready" not in log_path(tmp_path, "worker").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_down_ends_a_stubborn_service_and_its_descendants(service, tmp_path):
    state = start_service(service, tmp_path, tmp_path)
    wait_ready(tmp_path)
    assert running(tmp_path, "worker") == state
    tree = [psutil.Process(state.pid), *psutil.Process(state.pid).children(recursive=True)]
    assert len(tree) == 3 and tree_facts(state)[0] == 3
    assert os.getsid(state.pid) == state.pid != os.getsid(0)
    assert stop_service("worker", tmp_path, 0.3) is True
    assert [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert read_state(tmp_path, "worker") is None
    assert stop_service("worker", tmp_path, 0.3) is False


def test_what_a_killed_reaper_left_is_ended_before_the_next_start(service, tmp_path):
    first = start_service(service, tmp_path, tmp_path)
    wait_ready(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    os.waitpid(first.pid, 0)
    left = marked(service_token(tmp_path, "worker"))
    assert len(left) == 2 and running(tmp_path, "worker") is None
    second = start_service(service, tmp_path, tmp_path)
    assert [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert running(tmp_path, "worker") == second


def test_services_outlive_who_started_them(service, tmp_path):
    code = (
        "import sys; from pathlib import Path; from flows.services.process import start_service\n"
        "from flows.services.specs import ServiceSpec; import os\n"
        "spec = ServiceSpec('worker', (sys.executable, '-c', sys.argv[2]), dict(os.environ),"
        " 'u', None, 0.3)\n"
        "start_service(spec, Path(sys.argv[1]), Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), STUBBORN]
    subprocess.run(command, env=service.environment, check=True, timeout=60)
    wait_ready(tmp_path)
    assert running(tmp_path, "worker") is not None


def test_a_taken_port_is_named_with_its_holder_and_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = ServiceSpec("mlflow", (), {}, "", port, 1.0)
        with pytest.raises(PortTakenError, match=f"--mlflow-port {port + 1}") as caught:
            refuse_taken_port(spec, 0.1)
        assert f"127.0.0.1:{port} is taken by process {os.getpid()}" in str(caught.value)
    refuse_taken_port(spec)


def test_one_up_or_down_at_a_time(tmp_path):
    seen = []

    def second():
        try:
            with services_lock(tmp_path):
                seen.append("entered")
        except ServicesBusyError as error:
            seen.append(str(error))

    with services_lock(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(seen) == 1 and "another `rl-pipeline up`" in seen[0]
    second()
    assert seen[1] == "entered"


def test_a_large_log_is_set_aside_once(service, tmp_path, monkeypatch):
    monkeypatch.setattr("flows.services.process.MAX_LOG_BYTES", 10)
    log = log_path(tmp_path, "worker")
    log.parent.mkdir(parents=True)
    log.write_text("x" * 11)
    start_service(service, tmp_path, tmp_path)
    wait_ready(tmp_path)
    assert log.with_name("worker.log.1").read_text() == "x" * 11
    assert not log.read_text().startswith("x")
    assert state_path(tmp_path, "worker").exists()
