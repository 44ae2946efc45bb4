"""A profile's file and what it builds on: `extends` a base, and `presets` for kinds of hardware.

A file may extend a base in `configs/bases` or another profile; what it sets lies over that. Any of
them may hold presets, blocks of settings by name, of which `hardware` chooses one; a preset lies
over its own file. Neither key is left in the config that comes out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.problems import MISSING, ConfigError, ConfigProblem
from configs.yaml_text import KeyPath, Place, YamlTextError, read_yaml_file

EXTENDS, PRESETS, HARDWARE = "extends", "presets", "hardware"
BASE_FOLDER = Path(__file__).parent / "bases"
Layer = tuple[Mapping[str, Any], Mapping[KeyPath, Place]]


def bases() -> dict[str, Path]:
    """The bases that come with the project, by name."""
    return {path.stem: path for path in sorted(BASE_FOLDER.glob("*.yaml"))}


def read_layers(
    path: Path, known: Mapping[str, Path], hardware: tuple[Any, str] | None
) -> list[Layer]:
    """What to lay over the defaults, lowest first.

    Args:
        known: bases and profiles that `extends` may name.
        hardware: the override that chooses a preset, and where it stands; of None, none is taken.

    Raises:
        ConfigError: a file cannot be read, extends what is not there or itself, or has no such
            preset.
    """
    files = _chain(path, known, ())
    own = [value[HARDWARE] for value, _ in files if HARDWARE in value]
    chosen, origin = hardware or (own[-1] if own else None, str(path))
    presets = {name for value, _ in files for name in _presets(value)}
    known_name = isinstance(chosen, str) and chosen in presets
    if chosen is not None and not known_name and (presets or hardware):
        expected = (
            f"one of {', '.join(sorted(presets))}: the presets of this profile"
            if presets
            else "null: this profile has no presets"
        )
        raise ConfigError([ConfigProblem(HARDWARE, chosen, expected, origin)], str(path))
    return [layer for value, places in files for layer in _split(value, places, chosen)]


def _chain(path: Path, known: Mapping[str, Path], above: tuple[Path, ...]) -> list[Layer]:
    value, places = _read(path)
    base = value.pop(EXTENDS, None)
    if base is None:
        return [(value, places)]
    origin = places[(EXTENDS,)].text
    found = known.get(base) if isinstance(base, str) else None
    if found is None:
        expected = f"a base or profile: {', '.join(sorted(known))}"
        raise ConfigError([ConfigProblem(EXTENDS, base, expected, origin)], str(path))
    if found in (path, *above):
        raise ConfigError(
            [ConfigProblem(EXTENDS, base, "not a file that extends this one", origin)]
        )
    return [*_chain(found, known, (path, *above)), (value, places)]


def _read(path: Path) -> tuple[dict[str, Any], dict[KeyPath, Place]]:
    try:
        value, places = read_yaml_file(path)
    except YamlTextError as error:
        origin = f"{path}:{error.line}" if error.line else str(path)
        raise ConfigError([ConfigProblem("", MISSING, error.message, origin)]) from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise ConfigError([ConfigProblem("", str(path), reason)]) from error
    if not isinstance(value, dict) or not value:
        what = "is empty" if not value else f"holds a {type(value).__name__}"
        expected = f"the file {what}; it must hold keys such as `profile: calculator`"
        raise ConfigError([ConfigProblem("", MISSING, expected, str(path))])
    return value, places


def _presets(value: Mapping[str, Any]) -> dict[str, Any]:
    found = value.get(PRESETS)
    return found if isinstance(found, dict) else {}


def _split(value: Mapping[str, Any], places: Mapping[KeyPath, Place], chosen: Any) -> list[Layer]:
    """A file without its presets, and then the chosen one of them."""
    own = {key: item for key, item in value.items() if key != PRESETS}
    layers: list[Layer] = [(own, {p: at for p, at in places.items() if p[:1] != (PRESETS,)})]
    preset = _presets(value).get(chosen) if isinstance(chosen, str) else None
    if isinstance(preset, dict):
        inside = {p[2:]: at for p, at in places.items() if p[:2] == (PRESETS, chosen)}
        layers.append((preset, {p: at for p, at in inside.items() if p}))
    return layers
