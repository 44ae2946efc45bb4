"""Reads the file of devices; every fault comes back by key and line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.keys import nearest_keys
from configs.problems import MISSING, ConfigError, ConfigProblem
from configs.schema.devices import Device, Fleet
from configs.yaml_text import KeyPath, Place, YamlTextError, read_yaml_file

EXAMPLE = "configs/devices.yaml"


def load_fleet(path: str | Path) -> Fleet:
    """The devices in a file.

    Raises:
        ConfigError: no such file, broken YAML, an unknown key, a value that is not allowed, a name
            that stands twice, or no device at all.
    """
    source = Path(path)
    try:
        value, places = read_yaml_file(source)
    except YamlTextError as error:
        origin = f"{source}:{error.line}" if error.line else str(source)
        raise ConfigError([ConfigProblem("", MISSING, error.message, origin)]) from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}; {EXAMPLE} shows how it looks"
        raise ConfigError([ConfigProblem("", str(source), reason)]) from error
    if not isinstance(value, dict) or not value.get("devices"):
        expected = f"lists no device; add entries under `devices:`, as {EXAMPLE} shows"
        raise ConfigError([ConfigProblem("devices", MISSING, expected, str(source))])
    try:
        return Fleet.model_validate(value)
    except ValidationError as error:
        problems = [_problem(e, places, str(source)) for e in error.errors(include_url=False)]
        raise ConfigError(problems, str(source)) from None


def choose(fleet: Fleet, names: Sequence[str]) -> tuple[Device, ...]:
    """The devices of these names, in the file's order; all of them without names.

    Raises:
        ConfigError: a name that is not in the file.
    """
    known = [device.name for device in fleet.devices]
    for name in names:
        if name not in known:
            near = nearest_keys(name, known)
            tip = f"did you mean {near[0]}?" if near else ""
            expected = f"no such device; there are {', '.join(known)}"
            raise ConfigError([ConfigProblem("devices", name, expected, suggestion=tip)])
    return tuple(d for d in fleet.devices if not names or d.name in names)


def _problem(error: Mapping[str, Any], places: Mapping[KeyPath, Place], source: str) -> Any:
    loc = tuple(str(part) for part in error["loc"])
    key = ".".join(loc)
    value = (
        error.get("input", MISSING) if error["type"] not in ("missing", "value_error") else MISSING
    )
    owner = Device if loc[:1] == ("devices",) and len(loc) > 2 else Fleet
    place = _place(loc, places, source)
    if error["type"] == "extra_forbidden":
        near = nearest_keys(loc[-1], list(owner.model_fields))
        tip = f"did you mean {near[0]}?" if near else ""
        expected = f"unknown key; there are {', '.join(owner.model_fields)}"
        return ConfigProblem(key, value, expected, place, tip)
    if error["type"] == "missing":
        return ConfigProblem(key, MISSING, "required", place)
    reason = str(error.get("ctx", {}).get("error") or error["msg"])
    value = MISSING if isinstance(error.get("input"), Mapping) else error.get("input", MISSING)
    return ConfigProblem(key, value, reason, place)


def _place(loc: KeyPath, places: Mapping[KeyPath, Place], source: str) -> str:
    for length in range(len(loc), 0, -1):
        if loc[:length] in places:
            return places[loc[:length]].text
    return source
