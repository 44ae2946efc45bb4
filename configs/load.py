"""Defaults < base < preset < YAML profile < dotted overrides, validated; faults come all at once.

Merging is by key and knows the schema: setting `sft.optimiser.lr` keeps the rest of the default
block, and choosing another `type` of a tagged union leaves the other variant's keys behind and
says so.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from configs.keys import (
    REQUIRED,
    TAG,
    Key,
    block_variants,
    describe,
    is_tagged,
    json_default,
    mapping_value,
    nearest_keys,
)
from configs.layers import HARDWARE, bases, read_layers
from configs.problems import MISSING, ConfigError, ConfigProblem, explain
from configs.schema import PipelineConfig
from configs.yaml_text import KeyPath, Place, YamlTextError, read_yaml_value

__all__ = [
    "ConfigError",
    "ConfigProblem",
    "Key",
    "ResolvedConfig",
    "describe",
    "dump_config",
    "load_config",
    "profiles",
    "resolve_config",
]

logger = logging.getLogger(__name__)

PROFILE_FOLDER = Path(__file__).parent
NOT_PROFILES = frozenset({"devices"})
"""Other YAML files that lie beside the profiles."""
Overrides = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class ResolvedConfig:
    """A valid config, what was said about it on the way, and where its values came from."""

    config: PipelineConfig
    notes: tuple[str, ...]
    """Facts a person should see, such as keys left behind by a change of `type`."""
    places: dict[str, str] = field(default_factory=dict)
    """Dotted key → file and line, or override; keys not here have their default."""


SEEDED = ("data", "sft", "rl")
"""Stages with a seed that follows the run's."""


def load_config(path_or_profile: str | Path, overrides: Overrides = ()) -> PipelineConfig:
    """The config of a file or of a profile's name, overrides applied.

    Raises:
        ConfigError: anything wrong with the file, a key or a value; lists every fault.
    """
    resolved = resolve_config(path_or_profile, overrides)
    for note in resolved.notes:
        logger.warning("%s", note)
    return resolved.config


def resolve_config(path_or_profile: str | Path, overrides: Overrides = ()) -> ResolvedConfig:
    """As `load_config`, with notes and origins.

    Raises:
        ConfigError: anything wrong with the file, a key or a value; lists every fault.
    """
    path = find_profile(path_or_profile)
    merge = _Merge()
    parsed = _parsed(overrides)
    chosen = [(value, at.text) for key, value, at in parsed if key == (HARDWARE,)]
    for layer in read_layers(path, bases() | profiles(), chosen[-1] if chosen else None):
        merge.add(*layer)
    _add_overrides(merge, parsed)
    _hand_down_seed(merge)
    try:
        text = json.dumps(merge.data)
        config = PipelineConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems = explain(error.errors(include_url=False), merge.origin)
        raise ConfigError(problems, str(path)) from None
    except (TypeError, ValueError, RecursionError) as error:
        problem = ConfigProblem("", MISSING, f"a value is not plain data: {error}")
        raise ConfigError([problem], str(path)) from error
    places = {".".join(p): place.text for p, place in merge.places.items() if p}
    return ResolvedConfig(config, tuple(merge.notes), places)


def dump_config(config: PipelineConfig) -> dict[str, Any]:
    """Every key with its value, as plain JSON data; loading it again gives an equal config."""
    return config.model_dump(mode="json")


def profiles() -> dict[str, Path]:
    """The profiles that come with the project, by name."""
    found = sorted(PROFILE_FOLDER.glob("*.yaml"))
    return {path.stem: path for path in found if path.stem not in NOT_PROFILES}


def find_profile(path_or_profile: str | Path) -> Path:
    """The file meant: a path, or the name of a profile.

    Raises:
        ConfigError: neither; lists the profiles.
    """
    path = Path(path_or_profile)
    if path.is_file():
        return path
    known = profiles()
    if str(path_or_profile) in known:
        return known[str(path_or_profile)]
    what = "a folder" if path.is_dir() else "no such file or profile"
    near = nearest_keys(path.stem, list(known))
    problem = ConfigProblem(
        "",
        str(path_or_profile),
        f"{what}; give a YAML file or one of the profiles {', '.join(known) or '(none)'}",
        suggestion=f"did you mean {near[0]}?" if near else "",
    )
    raise ConfigError([problem])


def _parsed(overrides: Overrides) -> list[tuple[KeyPath, Any, Place]]:
    if isinstance(overrides, Mapping):
        return [_mapped(key, value) for key, value in overrides.items()]
    return _parse_all(overrides)


def _add_overrides(merge: "_Merge", parsed: Sequence[tuple[KeyPath, Any, Place]]) -> None:
    """Apply overrides, those that choose a variant first, outer ones before those within; of two
    for one key the last counts."""
    last: dict[KeyPath, Place] = {}
    for path, value, place in sorted(parsed, key=lambda item: _turn(item[0])):
        if path in last:
            merge.notes.append(f"{place.text} replaces the earlier {last[path].text}")
        last[path] = place
        nested = value
        for name in reversed(path):
            nested = {name: nested}
        merge.add(nested, {path: place})


def _turn(path: KeyPath) -> tuple[bool, int]:
    """Where an override stands in the order they are applied in."""
    return (path[-1] != TAG, len(path) if path[-1] == TAG else 0)


def _hand_down_seed(merge: "_Merge") -> None:
    """Give the run's seed to every stage that nobody gave one of its own."""
    seed = merge.data.get("seed")
    for block in SEEDED if isinstance(seed, int) else ():
        if isinstance(merge.data.get(block), dict) and (block, "seed") not in merge.places:
            merge.data[block]["seed"] = seed


def _mapped(key: str, value: Any) -> tuple[KeyPath, Any, Place]:
    path = tuple(str(key).split("."))
    if not all(path):
        raise ConfigError([_not_an_override(str(key))])
    return path, value, Place(f"override {key}")


def _not_an_override(text: str) -> ConfigProblem:
    return ConfigProblem(
        "", text, "an override is a dotted key, `=` and a value, as in rl.steps=20", "command line"
    )


def _parse_all(overrides: Sequence[str]) -> list[tuple[KeyPath, Any, Place]]:
    if isinstance(overrides, str):
        overrides = [overrides]
    parsed, problems = [], []
    for text in overrides:
        key, equals, raw = text.partition("=")
        path = tuple(part.strip() for part in key.strip().removeprefix("--").split("."))
        if not equals or not all(path):
            problems.append(_not_an_override(text))
            continue
        place = Place(f"command line: {text}", raw)
        try:
            parsed.append((path, read_yaml_value(raw), place))
        except YamlTextError as error:
            problems.append(ConfigProblem(".".join(path), raw, error.message, place.text))
    if problems:
        raise ConfigError(problems)
    return parsed


def variant_defaults(variant: type[BaseModel]) -> dict[str, Any]:
    """JSON defaults of a block's keys; those without a default are left out."""
    found = {name: json_default(info) for name, info in variant.model_fields.items()}
    return {name: value for name, value in found.items() if value != REQUIRED}


class _Merge:
    """The config so far, as JSON data, and where each value came from."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = dump_config(PipelineConfig())
        self.places: dict[KeyPath, Place] = {}
        self.notes: list[str] = []

    def add(self, incoming: Mapping[str, Any], places: Mapping[KeyPath, Place]) -> None:
        """Lay `incoming` over what is there."""
        self.data = self._block(self.data, incoming, PipelineConfig, ())
        self.places |= places

    def origin(self, path: KeyPath, exact: bool) -> str:
        """Where the value at `path` was written, or what lies in it, or the block around it."""
        inside = [p for p in self.places if p[: len(path)] == path]
        if inside:
            return self.places[min(inside, key=len)].text
        for length in range(0 if exact else len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]].text
        return "default"

    def _value(self, base: Any, incoming: Any, annotation: Any, path: KeyPath) -> Any:
        if not isinstance(incoming, Mapping):
            self._drop_places(path)
            return incoming
        variants = block_variants(annotation)
        pair = mapping_value(annotation)
        if variants:
            base, variant = self._variant(base, incoming, annotation, path)
            return self._block(base, incoming, variant, path)
        if pair is not None:
            merged = dict(base or {})
            for name, value in incoming.items():
                merged[name] = self._value(merged.get(name), value, pair[1], (*path, name))
            return merged
        self._drop_places(path)
        return dict(incoming)

    def _variant(
        self, base: Any, incoming: Mapping[str, Any], annotation: Any, path: KeyPath
    ) -> tuple[dict[str, Any], type[BaseModel] | None]:
        """The block to lay `incoming` over, and its class: another one where `type` changes."""
        variants = block_variants(annotation)
        if not is_tagged(annotation):
            only = next(iter(variants.values()))
            return (base if isinstance(base, dict) else variant_defaults(only)), only
        old = base.get(TAG) if isinstance(base, dict) else None
        tag = incoming.get(TAG, old)
        variant = variants.get(tag) if isinstance(tag, str) else None
        if variant is None:
            return {}, None
        if tag == old:
            return base, variant
        self._say_dropped(path, str(old), str(tag))
        return variant_defaults(variant), variant

    def _say_dropped(self, path: KeyPath, old: str, tag: str) -> None:
        """Note which keys of the former variant go, where someone had set them."""
        places = dict(self.places)
        dropped = [p for p in self._drop_places(path) if len(p) > len(path) and p[-1] != TAG]
        if dropped:
            names = ", ".join(f"{'.'.join(p)} ({places[p].text})" for p in dropped)
            self.notes.append(
                f"{'.'.join((*path, TAG))}={tag} drops what was set for type {old}: {names}"
            )

    def _drop_places(self, path: KeyPath) -> list[KeyPath]:
        below = [p for p in self.places if p[: len(path)] == path]
        for p in below:
            del self.places[p]
        return below

    def _block(
        self,
        base: dict[str, Any],
        incoming: Mapping[str, Any],
        variant: type[BaseModel] | None,
        path: KeyPath,
    ) -> dict[str, Any]:
        merged = dict(base)
        for name, value in incoming.items():
            info = variant.model_fields.get(name) if variant is not None else None
            inner = (*path, name)
            merged[name] = (
                self._value(base.get(name), value, info.annotation, inner)
                if info is not None
                else value
            )
        return merged
