import json
from pathlib import Path

import pytest

from deployment.jetson.on_device.settings import (
    DeviceSettings,
    FieldLogSettings,
    SettingsError,
    installed_root,
    read_settings,
)


def _write(root, value, mode=0o644):
    path = root / "etc/rl-pipeline/agent.json"
    path.parent.mkdir(parents=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    path.chmod(mode)


def test_nothing_is_kept_unless_the_owner_says_so(tmp_path):
    for root in (None, tmp_path):
        assert read_settings(root) == DeviceSettings()
    assert not DeviceSettings().field_log.enabled
    _write(tmp_path, {})
    assert read_settings(tmp_path) == DeviceSettings()


def test_settings_are_read(tmp_path):
    log = {"enabled": True, "opt_in": True, "max_bytes": 1000, "max_rows": 5}
    _write(tmp_path, {"llama_server": "/x/llama-server", "field_log": log})
    found = read_settings(tmp_path)
    assert found == DeviceSettings("/x/llama-server", FieldLogSettings(True, True, False, 1000, 5))


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("{", "not JSON"),
        ("[" * 50_000, "not JSON"),
        ("[]", "must be a JSON object"),
        ({"feild_log": {}}, r"unknown keys \['feild_log'\]"),
        ({"field_log": {"on": True}}, r"unknown keys \['on'\]"),
        ({"field_log": {"enabled": 1}}, "enabled=1, expected bool"),
        ({"field_log": {"max_rows": True}}, "max_rows=True, expected int"),
        ({"field_log": {"max_bytes": 0}}, "max_bytes=0"),
        ({"field_log": []}, r"field_log=\[\], expected dict"),
        ({"llama_server": None}, "llama_server=None, expected str"),
        (" " * 70_000, "is over"),
    ],
)
def test_settings_that_cannot_be(tmp_path, value, match):
    _write(tmp_path, value)
    with pytest.raises(SettingsError, match=match):
        read_settings(tmp_path)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_settings_that_others_can_change_name_a_program_to_run(tmp_path, mode):
    _write(tmp_path, {}, mode)
    with pytest.raises(SettingsError, match="chmod go-w"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("bundle", "root"),
    [
        ("/opt/rl-pipeline/agent/releases/0123456789ab", "/"),
        ("/srv/dev1/opt/rl-pipeline/agent/releases/0123456789ab", "/srv/dev1"),
        ("/data/runs/store/package/x/bundle", None),
        ("/opt/rl-pipeline/agent/bundle", None),
        ("/usr/rl-pipeline/agent/releases/0", None),
        ("/", None),
        ("/a", None),
    ],
)
def test_root_of_an_installed_bundle(bundle, root):
    assert installed_root(Path(bundle)) == (None if root is None else Path(root))


def test_root_through_the_current_link(tmp_path):
    release = tmp_path / "opt/rl-pipeline/agent/releases/0123456789ab"
    release.mkdir(parents=True)
    (release.parents[1] / "current").symlink_to("releases/0123456789ab")
    assert installed_root(release.parents[1] / "current") == tmp_path
