"""What the owner of a device chose, in `/etc/rl-pipeline`: never part of a bundle.

Standard library only, Python 3.10. Below the root of the device a release is installed on:

    etc/rl-pipeline/allowed_signers   who may sign bundles (enrolment)
    etc/rl-pipeline/api_key           one line, mode 0600: what clients must send
    etc/rl-pipeline/agent.json        optional; all keys optional:
        {"llama_server": "/opt/rl-pipeline-runtime/bin/llama-server",
         "field_log": {"enabled": false, "opt_in": false, "keep_private_text": false,
                       "max_bytes": 67108864, "max_rows": 50000}}
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "etc/rl-pipeline"
SETTINGS_FILE = f"{FOLDER}/agent.json"
KEY_FILE = f"{FOLDER}/api_key"
FIELD_FOLDER = "var/lib/rl-pipeline/field"
MAX_SETTINGS_BYTES = 1 << 16


class SettingsError(ValueError):
    """A file under `/etc/rl-pipeline` cannot be used; says what is wrong and what to do."""


@dataclass(frozen=True)
class FieldLogSettings:
    """Whether and how much the agent remembers of what it was asked; nothing, unless enabled."""

    enabled: bool = False
    opt_in: bool = False
    """Requests count as opted in unless they say otherwise."""
    keep_private_text: bool = False
    """Keep the texts of requests that did not opt in, too; they never leave the device."""
    max_bytes: int = 64 << 20
    max_rows: int = 50_000


@dataclass(frozen=True)
class DeviceSettings:
    """`agent.json`."""

    llama_server: "str | None" = None
    """A llama-server to run instead of `python -m llama_cpp.server`."""
    field_log: FieldLogSettings = field(default_factory=FieldLogSettings)


def installed_root(bundle: Path) -> "Path | None":
    """The root of the device that a bundle is installed on; None for a bundle lying elsewhere.

    Installed is `ROOT/opt/rl-pipeline/NAME/releases/SHA`.
    """
    parents = bundle.resolve().parents
    if len(parents) < 5 or parents[0].name != "releases":
        return None
    return parents[4] if (parents[3].name, parents[2].name) == ("opt", "rl-pipeline") else None


def _checked(what: str, value: object, kinds: Mapping) -> dict:
    if not isinstance(value, dict):
        raise SettingsError(f"{what} must be a JSON object")
    unknown = sorted(set(value) - set(kinds))
    if unknown:
        raise SettingsError(f"{what} has unknown keys {unknown}; known are {sorted(kinds)}")
    for key, found in value.items():
        kind = kinds[key]
        if type(found) is not kind or (kind is int and found < 1):
            raise SettingsError(f"{what}: {key}={found!r}, expected {kind.__name__}")
    return value


def read_settings(root: "Path | None") -> DeviceSettings:
    """The settings of a device; the defaults where it has no file, or no root.

    Raises:
        SettingsError: not readable, writable by others, not JSON, or a wrong key or value.
    """
    if root is None or not (root / SETTINGS_FILE).exists():
        return DeviceSettings()
    path = root / SETTINGS_FILE
    try:
        info, raw = path.stat(), path.read_bytes()[: MAX_SETTINGS_BYTES + 1]
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(f"{path} can be changed by others; run: chmod go-w {path}")
    if len(raw) > MAX_SETTINGS_BYTES:
        raise SettingsError(f"{path} is over {MAX_SETTINGS_BYTES} bytes")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not JSON: {error}") from None
    value = dict(_checked(str(path), value, {"llama_server": str, "field_log": dict}))
    kinds = {"enabled": bool, "opt_in": bool, "keep_private_text": bool}
    kinds.update({"max_bytes": int, "max_rows": int})
    log = _checked(f"{path}: field_log", value.pop("field_log", {}), kinds)
    return DeviceSettings(**value, field_log=FieldLogSettings(**log))
