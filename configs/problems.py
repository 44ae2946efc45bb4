"""What is wrong with a config, said in the keys a person types."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from configs.keys import (
    TAG,
    all_keys,
    block_variants,
    field_type,
    is_tagged,
    mapping_value,
    nearest_keys,
    type_text,
)
from configs.schema import PipelineConfig
from configs.yaml_text import KeyPath

Origin = Callable[[KeyPath, bool], str]
"""Where a key path was written; True asks for that very key, else the block around it will do."""
_KEY_IN_TEXT = re.compile(r"[a-z_]\w*(?:\.\w+)*")


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong."""

    key: str
    """Dotted key as typed; empty where the whole file is meant."""
    value: Any
    expected: str
    """What is allowed there."""
    origin: str = ""
    """File and line, the command line, or `default`."""
    suggestion: str = ""
    """What was probably meant."""

    def __str__(self) -> str:
        shown = "" if self.value is MISSING else f" = {shorten(self.value)}"
        where = f"  ({self.origin})" if self.origin else ""
        tip = f"; {self.suggestion}" if self.suggestion else ""
        return f"{self.key}{shown}{where}: {self.expected}{tip}".lstrip(" =:")


class _Missing:
    """Stands for a value that was never given."""

    _only: "_Missing | None" = None

    def __new__(cls) -> "_Missing":
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


class ConfigError(ValueError):
    """A config that cannot be used; `problems` lists every fault found."""

    def __init__(self, problems: Sequence[ConfigProblem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{self.source}: " if self.source else ""
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{head}{count} problem{'s' if count != 1 else ''} in the config\n{lines}"


def shorten(value: Any, limit: int = 80) -> str:
    """A value as it would be typed, cut to `limit` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def explain(errors: Sequence[Mapping[str, Any]], origin: Origin) -> list[ConfigProblem]:
    """Pydantic's errors as problems, one for each key."""
    found: dict[tuple[str, str], ConfigProblem] = {}
    for error in errors:
        for problem in _explain_one(error, origin):
            found.setdefault((problem.key, problem.origin), problem)
    return list(found.values())


@dataclass(frozen=True)
class _Spot:
    """Where an error lies: the key path, the item of a list, the annotation, the block."""

    path: KeyPath
    item: int | None
    annotation: Any
    allowed: str
    block: type[BaseModel] | None
    """The class whose keys could stand at the end of `path`."""
    union_path: KeyPath | None = None
    """The tagged union whose variant `block` is."""
    union: Any = None


def _locate(loc: Sequence[str | int]) -> _Spot:
    """Follow a pydantic location through the schema, leaving out tags and union members."""
    spot = _Spot((), None, PipelineConfig, "a block of keys", PipelineConfig)
    tag_next = False
    for part in loc:
        spot, tag_next = _follow(spot, part, tag_next)
    return spot


def _follow(spot: _Spot, part: str | int, tag_next: bool) -> tuple[_Spot, bool]:
    if tag_next:
        variant = block_variants(spot.annotation).get(str(part))
        return (
            _Spot(spot.path, None, variant, spot.allowed, variant, spot.path, spot.annotation),
            False,
        )
    if part == "[key]":
        return spot, False
    if isinstance(part, int):
        return _Spot(spot.path, part, spot.annotation, spot.allowed, None), False
    pair = mapping_value(spot.annotation)
    if spot.block is not None:
        field = spot.block.model_fields.get(part)
        path = (*spot.path, part)
        if field is None:
            return _Spot(path, None, None, "", spot.block, spot.union_path, spot.union), False
        tagged = is_tagged(field.annotation)
        blocks = block_variants(field.annotation)
        block = next(iter(blocks.values())) if len(blocks) == 1 else None
        return _Spot(path, None, field.annotation, field_type(field), block), tagged
    if pair is not None:
        blocks = block_variants(pair[1])
        block = next(iter(blocks.values()), None)
        return _Spot((*spot.path, part), None, pair[1], type_text(pair[1]), block), False
    return spot, False


def _explain_one(error: Mapping[str, Any], origin: Origin) -> list[ConfigProblem]:
    kind, value, loc = str(error["type"]), error.get("input"), error["loc"]
    spot = _locate(loc)
    dotted = ".".join(spot.path)
    if kind == "extra_forbidden":
        return [_unknown(path, leaf, spot, origin) for path, leaf in _leaves(spot.path, value)]
    if kind == "value_error":
        return [_broken_rule(dotted, error, origin)]
    if kind == "missing" and spot.item is None:
        expected = f"required: {spot.allowed}"
        return [ConfigProblem(dotted, MISSING, expected, origin((*spot.path[:-1], TAG), False))]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return [_unknown_tag(spot, value, origin)]
    if loc and loc[-1] == "[key]":
        pair = mapping_value(_locate(loc[:-2]).annotation)
        allowed = type_text(pair[0]) if pair else spot.allowed
        parent = ".".join(spot.path[:-1])
        return [
            ConfigProblem(
                dotted, MISSING, f"unknown key; {parent} has {allowed}", origin(spot.path, False)
            )
        ]
    place = origin(spot.path, False)
    if spot.item is not None and kind != "missing":
        expected = f"item {spot.item + 1} is not allowed; expected {spot.allowed}"
        return [ConfigProblem(dotted, value, expected, place)]
    return [
        ConfigProblem(
            dotted, value, f"expected {spot.allowed}", place, _hint(kind, value, spot.allowed)
        )
    ]


def _leaves(path: KeyPath, value: Any) -> list[tuple[KeyPath, Any]]:
    """An unknown block is reported by the keys inside it, as a person typed them."""
    if not isinstance(value, Mapping) or not value:
        return [(path, value)]
    return [leaf for name, inner in value.items() for leaf in _leaves((*path, str(name)), inner)]


def _unknown(path: KeyPath, value: Any, spot: _Spot, origin: Origin) -> ConfigProblem:
    dotted = ".".join(path)
    keys = all_keys()
    parent = ".".join(spot.path[:-1])
    here = sorted(spot.block.model_fields) if spot.block else []
    expected = f"unknown key; {parent or 'the top level'} has {', '.join(here)}"
    owners = [key.when for key in keys if key.dotted == dotted and key.when]
    if owners:
        now = _tag_now(spot)
        suggestion = f"it belongs to {' or '.join(owners)}{now}"
    else:
        allowed = _settable(keys, spot)
        near = nearest_keys(dotted, allowed)
        beside = near[:1] if near and near[0].rpartition(".")[0] == parent else near[:2]
        suggestion = f"did you mean {' or '.join(beside)}?" if near else ""
    return ConfigProblem(dotted, value, expected, origin(path, False), suggestion)


def _settable(keys: Sequence[Any], spot: _Spot) -> list[str]:
    """Keys to suggest: under the union in question, only those of the variant chosen."""
    if spot.union_path is None or spot.block is None:
        return [key.dotted for key in keys]
    prefix = ".".join(spot.union_path) + "."
    mine = {prefix + name for name in spot.block.model_fields}
    return [k.dotted for k in keys if not k.dotted.startswith(prefix) or k.dotted in mine]


def _tag_now(spot: _Spot) -> str:
    tag = spot.block.model_fields.get(TAG) if spot.block else None
    return f", and {'.'.join(spot.union_path or ())}.{TAG} is {tag.default}" if tag else ""


def _unknown_tag(spot: _Spot, value: Any, origin: Origin) -> ConfigProblem:
    tags = list(block_variants(spot.annotation))
    given = value.get(TAG, MISSING) if isinstance(value, Mapping) else value
    path = (*spot.path, TAG)
    near = nearest_keys(str(given), tags) if isinstance(given, str) else []
    return ConfigProblem(
        ".".join(path),
        given,
        "expected one of " + ", ".join(tags),
        origin(path, False),
        f"did you mean {near[0]}?" if near else "",
    )


def _broken_rule(dotted: str, error: Mapping[str, Any], origin: Origin) -> ConfigProblem:
    """A rule across keys: its message names them, so that they give the origin."""
    message = str(error.get("ctx", {}).get("error") or error["msg"])
    known = {key.dotted for key in all_keys()}
    named = [k for k in dict.fromkeys(_KEY_IN_TEXT.findall(message)) if k in known and "." in k]
    places = [f"{key}: {origin(tuple(key.split('.')), True)}" for key in named]
    return ConfigProblem(named[0] if named else dotted, MISSING, message, "; ".join(places))


def _hint(kind: str, value: Any, wants: str) -> str:
    """What to type instead, where it can be told."""
    if kind == "finite_number" or (isinstance(value, float) and value in _INFINITIES):
        return "NaN and infinity are never allowed"
    if isinstance(value, str):
        return _text_hint(value, wants)
    if isinstance(value, float) and value.is_integer() and "whole number" in wants:
        return f"write {int(value)}"
    if isinstance(value, bool | int | float | Mapping) and wants.startswith("text"):
        return "put it in quotes to have it read as text"
    if wants.startswith("a list") and not isinstance(value, list):
        return f"write it as a list: [{value}]"
    return ""


_INFINITIES = (float("inf"), float("-inf"))


def _text_hint(value: str, wants: str) -> str:
    low = value.strip().lower()
    if "true or false" in wants and low in ("yes", "on", "y", "1"):
        return "write true"
    if "true or false" in wants and low in ("no", "off", "n", "0"):
        return "write false"
    if "number" in wants:
        plain = low.replace("_", "").replace(",", ".")
        try:
            float(plain)
        except ValueError:
            return ""
        return f"this is text; write {plain} without quotes or separators"
    if wants.startswith("one of "):
        near = nearest_keys(value, wants.removeprefix("one of ").split(", "))
        return f"did you mean {near[0]}?" if near else ""
    if wants.startswith("a list"):
        return f"write it as a list: [{value}]"
    return ""
