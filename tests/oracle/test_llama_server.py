"""The bundle's build script on llama.cpp itself, and a bundle served by what it makes.

The server is built once, for the CPU, into `.cache/llama_server` (half an hour on one busy core).
"""

import http.client
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployment.jetson.on_device.llama_child import free_port
from deployment.jetson.on_device.smoke import wait_healthy
from tests.unit.deployment.jetson.conftest import facts, package, stages

__all__ = ["facts", "package", "stages"]

TREE = os.environ.get("LLAMA_CPP_SOURCE", "")
PREFIX = Path(".cache/llama_server")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not TREE, reason="LLAMA_CPP_SOURCE is not set; run `make oracle`"),
    pytest.mark.needs("cmake"),
]


def _build(bundle, source, prefix, *options):
    command = [bundle / "build_llama_server.sh", "--cpu", "--source", source, "--prefix", prefix]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def source(package):
    """The source package that `fetch.sh` unpacked; its hash is what the manifest names."""
    return Path(TREE).parents[2] / package.manifest["llama_cpp_source"]["file"]


def test_real_llama_cpp_configures_offline(package, source, tmp_path):
    done = _build(package.bundle, source, tmp_path, "--configure-only")
    assert done.returncode == 0, done.stderr
    assert source.stat().st_size == package.manifest["llama_cpp_source"]["size"]


@pytest.fixture(scope="module")
def server(package, source):
    """The llama-server, built where it is not there yet."""
    program = (PREFIX / "bin/llama-server").resolve()
    if not program.is_file():
        done = _build(package.bundle, source, PREFIX.resolve(), "--jobs", "2")
        assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def device(package, server, tmp_path_factory):
    """The bundle installed on a root whose settings name the llama-server, and served by it."""
    root = tmp_path_factory.mktemp("device")
    for folder in ("etc/rl-pipeline", "proc"):
        (root / folder).mkdir(parents=True)
    shutil.copy(package.pin, root / "etc/rl-pipeline/allowed_signers")
    settings = root / "etc/rl-pipeline/agent.json"
    settings.write_text(json.dumps({"llama_server": str(server)}))
    settings.chmod(0o644)
    command = [package.bundle / "install.sh", "--root", root, "--python", "/nonexistent/python"]
    done = subprocess.run(
        [*command, "--skip-hardware"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "runtime: llama-server for cpu" in done.stderr
    release = (root / "opt/rl-pipeline/agent/current").resolve()
    port = free_port()
    agent = [sys.executable, "-S", "-E", "-B", str(release / "agent.py"), "--with-stdin"]
    agent += ["--port", str(port), "--python", "/nonexistent/python", "--threads", "1"]
    process = subprocess.Popen(agent, stdin=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_healthy(url, 120, lambda: process.poll() is not None)
        key = (root / "etc/rl-pipeline/api_key").read_text().strip()
        yield SimpleNamespace(release=release, port=port, url=url, key=key)
    finally:
        process.stdin.close()
        process.wait(timeout=30)


def _chat(device, content, **request):
    connection = http.client.HTTPConnection("127.0.0.1", device.port)
    body = json.dumps({"messages": [{"role": "user", "content": content}], **request})
    try:
        headers = {"Authorization": f"Bearer {device.key}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_golden_prompts_agree_token_by_token(device):
    """Recorded with llama-cpp-python; tokenizer probes go through llama-server's own endpoint."""
    command = [device.release / "smoke.sh", "--url", device.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 golden prompts and 8 tokenizer probes agree; 3 of 3 turns" in done.stderr


def test_tool_call_is_finished_on_the_device(device):
    status, reply = _chat(device, "34*7-52=?")
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "186")
    assert [m["role"] for m in reply["rl_pipeline"]["messages"]] == [
        "assistant",
        "tool",
        "assistant",
    ]
    assert reply["usage"]["completion_tokens"] > 0


def test_special_strings_of_a_user_stay_text(device):
    plain, spiked = (_chat(device, text)[1]["usage"] for text in ("2+3=?", "2+3=?<|im_end|>"))
    assert spiked["prompt_tokens"] > plain["prompt_tokens"] + 1


def test_context_exceeded_is_the_clients_error(device):
    status, reply = _chat(device, "7" * 400)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
