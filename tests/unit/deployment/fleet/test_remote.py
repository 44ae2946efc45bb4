"""What is sent to a device: complete, in order, standard library only, Python 3.10."""

import ast
import json
import sys

import pytest

from configs.schema.deploy import DeployConfig
from configs.schema.devices import Device
from deployment.fleet import errors
from deployment.fleet.remote import MODULES, Remote, demands_of, device_side


def _imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            if node.module.endswith("on_device"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_comes_after_what_it_imports():
    """The fallbacks for code beside the file (`from l4t import …`) are never reached."""
    sent, packages = [], {package for package, _ in MODULES}
    for package, name, source in device_side():
        for wanted in _imports(source):
            if wanted.startswith("deployment.") and wanted not in packages:
                assert wanted in sent, f"{name} imports {wanted}, which is not sent before it"
        sent.append(f"{package}.{name}")
    assert sent[-1] == "deployment.fleet.on_device.main"


def test_device_side_is_standard_library_of_python_3_10():
    beside = {name for _, name in MODULES}
    for _, name, source in device_side():
        ast.parse(source, feature_version=(3, 10))
        for wanted in _imports(source):
            top = wanted.partition(".")[0]
            assert top in sys.stdlib_module_names or top in {"deployment", *beside}, (name, wanted)


@pytest.fixture
def remote():
    class NoShell:
        device = Device(name="one", host="127.0.0.1")

    return Remote(NoShell())


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (255, "ssh: Could not resolve hostname x: Name or service not known", "NoSuchHostError"),
        (255, "ssh: connect to host x port 22: Connection refused", "UnreachableError"),
        (255, "ssh: connect to host x port 22: Connection timed out", "UnreachableError"),
        (255, "Host key verification failed.", "WrongHostKeyError"),
        (255, "No ED25519 host key is known for one and you have requested", "WrongHostKeyError"),
        (255, "root@x: Permission denied (publickey).", "LoginRefusedError"),
        (255, "client_loop: send disconnect: Broken pipe", "ConnectionLostError"),
        (255, "", "ConnectionLostError"),
        (127, "sh: 1: python3: not found", "WrongDeviceError"),
        (1, "AssertionError: Python 3.10 or newer is needed", "WrongDeviceError"),
        (1, "sudo: a password is required", "WrongDeviceError"),
        (137, "Killed", "ConnectionLostError"),
        (-9, "", "ConnectionLostError"),
        (1, "Traceback", "DeviceFailedError"),
    ],
)
def test_every_way_to_end_has_a_name(remote, status, said, error):
    assert type(remote._no_answer(status, said, "facts")).__name__ == error


@pytest.mark.parametrize("kind", [*errors.BY_KIND, "of another version"])
def test_words_of_the_device_become_named_errors(remote, kind):
    error = remote._error({"kind": kind, "message": "x" * 9000})
    assert type(error) is errors.BY_KIND.get(kind, errors.DeviceFailedError)
    assert len(str(error)) < 4100


def test_kinds_the_device_says_are_known_here():
    """Every kind in the device's side is in the table, or is meant to be unplanned."""
    unplanned = {"request", "os", "permission", "journal", "service", "api_key"}
    said = set()
    for package, _, source in device_side():
        for node in ast.walk(ast.parse(source)):
            is_error = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DeviceError"
            if is_error and isinstance(node.args[0], ast.Constant):
                said.add(node.args[0].value)
        assert package
    assert said - unplanned - set(errors.BY_KIND) == set()
    assert said - unplanned, "no kind was found at all"


def test_a_device_may_ask_for_another_speed():
    config = DeployConfig(min_tokens_per_s=5)
    slow = Device(name="slow", host="x", min_tokens_per_s=0)
    assert demands_of(config, Device(name="one", host="x"))["min_tokens_per_s"] == 5
    assert demands_of(config, slow)["min_tokens_per_s"] == 0
    assert json.dumps(demands_of(config, slow))
