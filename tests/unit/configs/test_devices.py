"""The file of devices: what is refused, where, and with what advice."""

import re
from pathlib import Path

import pytest

from configs.devices import EXAMPLE, choose, load_fleet
from configs.load import profiles
from configs.problems import ConfigError

ONE = "devices:\n  - {name: one, host: 10.0.0.1}\n"


def _load(tmp_path, text):
    path = tmp_path / "devices.yaml"
    path.write_text(text, encoding="utf-8")
    return load_fleet(path)


def test_defaults_are_a_real_device(tmp_path):
    (device,) = _load(tmp_path, ONE).devices
    assert (device.port, device.root, device.service, device.serve_port) == (
        22,
        "/",
        "systemd",
        8080,
    )
    assert device.identity_path({}) is None


def test_identity_from_path_and_environment(tmp_path):
    (device,) = _load(tmp_path, "devices:\n  - {name: a, host: h, identity: env:KEY}\n").devices
    assert device.identity_path({"KEY": "/keys/id"}) == Path("/keys/id")
    with pytest.raises(KeyError, match="KEY"):
        device.identity_path({})
    (device,) = _load(tmp_path, "devices:\n  - {name: a, host: h, identity: ~/id}\n").devices
    assert device.identity_path({}) == Path.home() / "id"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("devices: []\n", "lists no device"),
        ("", "lists no device"),
        ("known_hosts: x\n", "lists no device"),
        (ONE + "device: 1\n", "unknown key"),
        ("devices:\n  - {name: one, host: h, serve_prot: 22}\n", "did you mean serve_port"),
        ("devices:\n  - {name: one}\n", "devices.0.host.*required"),
        ("devices:\n  - {host: h}\n", "devices.0.name.*required"),
        ("devices:\n  - {name: One, host: h}\n", "devices.0.name"),
        ("devices:\n  - {name: a b, host: h}\n", "devices.0.name"),
        ("devices:\n  - {name: a, host: user@h}\n", "without user, port or scheme"),
        ("devices:\n  - {name: a, host: -oProxyCommand=x}\n", "without user, port or scheme"),
        ("devices:\n  - {name: a, host: 'h; reboot'}\n", "without user, port or scheme"),
        ("devices:\n  - {name: a, host: ssh://h}\n", "without user, port or scheme"),
        ("devices:\n  - {name: a, host: ''}\n", "without user, port or scheme"),
        ("devices:\n  - {name: a, host: h, port: 0}\n", "devices.0.port"),
        ("devices:\n  - {name: a, host: h, port: 99999}\n", "devices.0.port"),
        ("devices:\n  - {name: a, host: h, user: -l}\n", "devices.0.user"),
        ("devices:\n  - {name: a, host: h, root: opt}\n", "an absolute path"),
        ("devices:\n  - {name: a, host: h, python: /a b}\n", "an absolute path"),
        ("devices:\n  - {name: a, host: h, service: docker}\n", "'systemd' or 'process'"),
        ("devices:\n  - {name: a, host: h, l4t: R36}\n", "devices.0.l4t"),
        ("devices:\n  - {name: a, host: h, min_tokens_per_s: .nan}\n", "finite"),
        (
            "devices:\n  - {name: a, host: h}\n  - {name: a, host: i}\n",
            "a and a have the same name",
        ),
        ("devices:\n  - {name: a, host: h}\n  - {name: b, host: h}\n", "same host, port and root"),
        ("devices: [\n", "flow sequence|flow node"),
        ("devices:\n  - {name: a, name: b, host: h}\n", "stands twice"),
    ],
)
def test_refused(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match):
        _load(tmp_path, text)


def test_the_line_is_named_and_every_fault_is_told(tmp_path):
    text = "devices:\n  - name: one\n    host: h\n  - name: two\n    host: u@h\n    port: x\n"
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text)
    told = str(caught.value)
    assert "devices.yaml:5" in told and "devices.yaml:6" in told


def test_no_such_file_names_the_example(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*configs/devices\.yaml"):
        load_fleet(tmp_path / "none.yaml")


def test_choose(tmp_path):
    text = "devices:\n" + "".join(f"  - {{name: orin-{n}, host: h{n}}}\n" for n in (1, 2, 3))
    fleet = _load(tmp_path, text)
    assert [d.name for d in choose(fleet, ())] == ["orin-1", "orin-2", "orin-3"]
    assert [d.name for d in choose(fleet, ["orin-3", "orin-1"])] == ["orin-1", "orin-3"]
    with pytest.raises(ConfigError, match=r"there are orin-1.*did you mean orin-"):
        choose(fleet, ["orin-4"])


def test_ipv6_and_names_are_hosts(tmp_path):
    for host in ("fe80::1", "::1", "orin-1.lan", "10.1.2.3", "a"):
        assert (
            _load(tmp_path, f"devices:\n  - {{name: a, host: '{host}'}}\n").devices[0].host == host
        )


def test_the_example_lists_nobody_until_its_entries_are_uncommented(tmp_path):
    text = Path(EXAMPLE).read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="lists no device"):
        load_fleet(EXAMPLE)
    entries = text.partition("devices: []\n")[2]
    fleet = _load(tmp_path, re.sub(r"^# ", "", entries, flags=re.MULTILINE))
    assert [d.name for d in fleet.devices] == ["orin-1", "orin-2"]
    assert fleet.devices[1].min_tokens_per_s == 20


def test_the_file_of_devices_is_no_profile():
    assert "devices" not in profiles()
    assert "calculator" in profiles()
