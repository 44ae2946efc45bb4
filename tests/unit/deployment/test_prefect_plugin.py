"""The plugin's rules; that Prefect's own command follows them is shown over real services."""

import asyncio
import os
import socket
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.plugins import HookContext
from prefect.settings import Settings

from deployment import prefect_plugin
from deployment.service_files import state_path
from tasks.artifacts import write_json

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def client_method():
    """Prefect's client as it was."""
    before = PrefectClient.read_deployment_by_name
    yield before
    PrefectClient.read_deployment_by_name = before


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rl-pipeline", "rl-pipeline/rl-pipeline"),
        ("rl-pipeline/rl-pipeline", "rl-pipeline/rl-pipeline"),
        ("other/nightly", "other/nightly"),
        ("über", "über/über"),
    ],
)
def test_bare_name(typed, meant, client_method):
    asked = []

    async def read(self, name):
        asked.append(name)
        return "deployment"

    PrefectClient.read_deployment_by_name = read
    prefect_plugin.resolve_bare_names()
    assert asyncio.run(PrefectClient.read_deployment_by_name(None, typed)) == "deployment"
    assert asked == [meant]


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ("/x/bin/python /x/bin/prefect deployment run rl-pipeline", True),
        ("python -m prefect worker start", True),
        ("python -P /x/bin/prefect version", True),
        ("python -m pytest tests", False),
        ("python -m prefect.engine", False),
        ("python -c import-prefect", False),
        ("python", False),
    ],
)
def test_only_the_prefect_command_is_touched(command, ours):
    assert prefect_plugin.is_prefect_command(command.split()) is ours


def hook(monkeypatch, argv, configured=None):
    """What the hook answers to a process with this command line."""
    monkeypatch.setattr(prefect_plugin.sys, "orig_argv", argv.split())
    return prefect_plugin.setup_environment(ctx=HookContext("3.7.7", configured, None))


def test_the_server_of_the_checkout_is_found_and_an_export_wins(
    tmp_path, monkeypatch, client_method
):
    import psutil

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("RL_PIPELINE_RUNS", raising=False)
    typed = "python bin/prefect deployment run rl-pipeline"
    assert hook(monkeypatch, typed, "http://h/api").env == {"PREFECT_API_URL": "http://h/api"}
    body = {"name": "prefect", "url": "http://127.0.0.1:77/api", "pid": os.getpid()}
    started = psutil.Process().create_time()
    write_json(state_path(Path("runs"), "prefect"), {**body, "started": started})
    found = hook(monkeypatch, typed, "http://h/api")
    assert found.env == {"PREFECT_API_URL": "http://127.0.0.1:77/api"}
    monkeypatch.setenv("PREFECT_API_URL", "http://exported/api")
    assert hook(monkeypatch, typed) is None
    assert hook(monkeypatch, "python -m pytest") is None


def test_without_a_server_the_remedy_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefect_plugin, "DEFAULT_PORT", 1)
    assert prefect_plugin.api_url(None) == prefect_plugin.DEFAULT_API_URL
    assert "make up" in capsys.readouterr().err
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(prefect_plugin, "DEFAULT_PORT", server.getsockname()[1])
        prefect_plugin.api_url(None)
    assert capsys.readouterr().err == ""


def test_the_pinned_prefect_loads_our_plugin_in_the_checkout_and_only_there(tmp_path, monkeypatch):
    (found,) = entry_points(group="prefect.plugins", name="rl-pipeline")
    assert found.value == "deployment.prefect_plugin"
    monkeypatch.chdir(ROOT)
    assert Settings().plugins.enabled and Settings().plugins.allow == {found.name}
    monkeypatch.chdir(tmp_path)
    assert not Settings().plugins.enabled
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert declared["project"]["entry-points"]["prefect.plugins"] == {found.name: found.value}
