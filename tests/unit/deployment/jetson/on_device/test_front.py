"""An installed agent, really served: its key, its metrics, what it keeps; and how it refuses."""

import http.client
import json
import shutil
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deployment.jetson.on_device.llama_child import free_port
from deployment.jetson.on_device.smoke import wait_healthy

OPT_IN = {"X-RL-Pipeline-Field-Log": "opt-in"}


def _installed(package, root, settings=None):
    """A device's root with the bundle installed; (release folder, API key)."""
    for folder in ("etc/rl-pipeline", "proc"):
        (root / folder).mkdir(parents=True)
    shutil.copy(package.pin, root / "etc/rl-pipeline/allowed_signers")
    command = [package.bundle / "install.sh", "--root", root, "--python", sys.executable]
    subprocess.run([*command, "--skip-hardware"], check=True, capture_output=True, timeout=60)
    if settings is not None:
        path = root / "etc/rl-pipeline/agent.json"
        path.write_text(json.dumps(settings))
        path.chmod(0o644)
    release = (root / "opt/rl-pipeline/agent/current").resolve()
    return release, (root / "etc/rl-pipeline/api_key").read_text().strip()


def _start(release, *options, **popen):
    command = [sys.executable, "-S", "-E", "-B", str(release / "agent.py"), "--with-stdin"]
    command += ["--python", sys.executable, "--threads", "1", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **popen)


@pytest.fixture(scope="module")
def device(package, tmp_path_factory):
    """The agent of a device whose owner turned the field log on."""
    root = tmp_path_factory.mktemp("device")
    release, key = _installed(package, root, {"field_log": {"enabled": True}})
    port = free_port()
    process = _start(release, "--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(url, 120, lambda: process.poll() is not None)
        yield SimpleNamespace(root=root, release=release, key=key, port=port, url=url)
    finally:
        process.stdin.close()
        process.wait(timeout=30)


def _ask(device, method, path, body=None, key="", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", device.port)
    key = device.key if key == "" else key
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def _chat(device, text, **headers):
    body = {"messages": [{"role": "user", "content": text}]}
    return _ask(device, "POST", "/v1/chat/completions", body, **headers)


def _rows(device):
    files = sorted((device.root / "var/lib/rl-pipeline/field").glob("agent-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_health_is_public_and_says_what_is_served(device, package):
    status, raw, _ = _ask(device, "GET", "/health", key=None)
    assert (status, json.loads(raw)) == (200, {"status": "ok", "release": package.record.sha256})


@pytest.mark.parametrize("key", [None, "wrong", "Bearer"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"),
     ("POST", "/extras/tokenize"), ("GET", "/nothing")],
)  # fmt: skip
def test_nothing_else_without_the_key(device, method, path, key):
    status, raw, headers = _ask(device, method, path, {} if method == "POST" else None, key=key)
    assert status == 401
    assert headers["WWW-Authenticate"] == "Bearer"
    assert json.loads(raw)["error"]["code"] == "invalid_api_key"


def test_with_the_key_it_answers_and_the_smoke_test_finds_the_key_itself(device):
    status, raw, _ = _chat(device, "34*7-52=?")
    assert (status, json.loads(raw)["choices"][0]["message"]["content"]) == (200, "186")
    command = [device.release / "smoke.sh", "--url", device.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "golden prompts" in done.stderr


def _sample(text, name):
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_metrics_count_what_was_asked(device, package):
    before = _ask(device, "GET", "/metrics")[1].decode()
    _chat(device, "2+3=?")
    _ask(device, "POST", "/v1/chat/completions", {"messages": []})
    status, raw, headers = _ask(device, "GET", "/metrics")
    after = raw.decode()
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")

    def grown(name):
        return _sample(after, name) - _sample(before, name)

    chat = 'rl_pipeline_requests_total{path="/v1/chat/completions",status='
    assert (grown(chat + '"200"'), grown(chat + '"400"')) == (1, 1)
    assert grown("rl_pipeline_chat_seconds_count") == 2
    assert grown("rl_pipeline_chat_seconds_sum") > 0
    assert grown('rl_pipeline_errors_total{code="invalid_request_error"}') == 1
    assert grown("rl_pipeline_prompt_tokens_total") > 0
    assert grown("rl_pipeline_completion_tokens_total") > 0
    assert grown("rl_pipeline_field_rows_total") == 2
    assert f'release="{package.record.sha256}"' in after
    assert _sample(after, "rl_pipeline_ready") == 1


def test_field_log_keeps_texts_only_of_who_opted_in(device, package):
    start = len(_rows(device))
    _chat(device, "34*7-52=?", **OPT_IN)
    _chat(device, "2+3=?")
    _ask(device, "POST", "/v1/chat/completions", {"messages": []}, **OPT_IN)
    opted_in, private, failed = _rows(device)[start:]
    assert opted_in["messages"] == [{"role": "user", "content": "34*7-52=?"}]
    assert (opted_in["answer"], opted_in["error"], opted_in["opted_in"]) == ("186", None, True)
    assert opted_in["release"] == package.record.sha256
    assert 0 < opted_in["latency_s"] < 300
    assert (private["messages"], private["answer"], private["opted_in"]) == (None, None, False)
    assert (failed["error"], failed["answer"]) == ("invalid_request_error", None)
    folder = device.root / "var/lib/rl-pipeline/field"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o600}


def test_wish_that_is_none_is_refused_and_not_kept(device):
    start = len(_rows(device))
    status, raw, _ = _chat(device, "2+3=?", **{"X-RL-Pipeline-Field-Log": "maybe"})
    assert (status, "expected one of opt-in, opt-out" in raw.decode()) == (400, True)
    assert len(_rows(device)) == start


def _refused(release, *options):
    with _start(release, "--port", "0", *options, stderr=subprocess.PIPE, text=True) as process:
        said = process.communicate(timeout=60)[1]
    assert "Traceback" not in said
    return process.returncode, said


def test_agent_does_not_start_without_a_key_it_was_told_of(package, tmp_path):
    release, _ = _installed(package, tmp_path)
    key = tmp_path / "etc/rl-pipeline/api_key"
    key.chmod(0o644)
    code, said = _refused(release)
    assert (code, "has mode 0644" in said) == (2, True)
    key.unlink()
    code, said = _refused(release, "--api-key-file", str(key))
    assert (code, "there is no API key at" in said) == (2, True)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"field_log": {"enabled": "yes"}}, "enabled='yes', expected bool"),
        ({"llama_server": "/nonexistent/llama-server"}, "/nonexistent/llama-server: no such"),
    ],
)
def test_agent_does_not_start_with_settings_that_cannot_be(package, tmp_path, settings, match):
    release, _ = _installed(package, tmp_path, settings)
    code, said = _refused(release)
    assert (code, match in said) == (2, True), said
