"""Reads YAML 1.2 scalars strictly and remembers the line each value came from.

PyYAML speaks YAML 1.1, where `1e-3` is text, `no` is a boolean and `012` is ten. Here `1e-3` is a
number, `no` is text, and a number with a leading zero is refused, since two readings exist.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str, ...]

MAX_NODES = 20_000
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = {"", "~", "null", "Null", "NULL"}
_INT = re.compile(r"[-+]?[0-9]+")
_RADIX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NON_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_UNTAGGED = "!untagged"


class YamlTextError(ValueError):
    """Text that is not the YAML accepted here; `line` is 1-based, 0 where unknown."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message, line)
        self.message = message
        self.line = line

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}" if self.line else self.message


@dataclass(frozen=True)
class Place:
    """Where a value was written: file and line, or the override as typed."""

    text: str
    """`configs/calculator.yaml:12`, or `command line: rl.steps=20`."""
    raw: str | None = None
    """The scalar as typed, before it was read."""


class _Loader(yaml.SafeLoader):
    """Composes nodes without resolving scalars; the types are read by `_scalar`."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The default tag of the node's kind; plain scalars are not looked at."""
        if kind is yaml.ScalarNode:
            return _UNTAGGED
        return str(super().resolve(kind, value, (False, False)))


def parse_yaml(text: str) -> tuple[Any, dict[KeyPath, tuple[int, str | None]]]:
    """The value of one YAML document, and for each key path its line and scalar as typed.

    Raises:
        YamlTextError: broken syntax, a repeated key, a tag, an alias that contains itself.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlTextError(
            ", ".join(part for part in (error.context, error.problem) if part) or "broken YAML",
            mark.line + 1 if mark else 0,
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise YamlTextError(f"broken YAML: {str(error).splitlines()[0]}") from error
    finally:
        loader.dispose()
    reader = _Reader()
    value = None if node is None else reader.value(node, (), ())
    return value, reader.lines


class _Reader:
    """Turns composed nodes into values."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, tuple[int, str | None]] = {}
        self._nodes = 0

    def value(self, node: yaml.Node, path: KeyPath, above: tuple[int, ...]) -> Any:
        """The value of `node`; `above` holds the ids of the nodes it lies in."""
        line = node.start_mark.line + 1
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise YamlTextError(f"more than {MAX_NODES} values, aliases written out", line)
        if id(node) in above:
            raise YamlTextError("an alias contains itself", line)
        self.lines[path] = (line, node.value if isinstance(node, yaml.ScalarNode) else None)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        _refuse_tag(node)
        inside = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(i)), inside) for i, item in enumerate(node.value)]
        return {
            key: self.value(item, (*path, key), inside) for key, item in self._pairs(node, path)
        }

    def _pairs(self, node: yaml.Node, path: KeyPath) -> Iterator[tuple[str, yaml.Node]]:
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise YamlTextError(
                    f"a key must be text, not {getattr(key_node, 'value', key)!r}", line
                )
            if key == "<<":
                raise YamlTextError("merge keys (`<<`) are not read; write the keys out", line)
            if key in first:
                name = ".".join((*path, key))
                raise YamlTextError(
                    f"{name} stands twice (first on line {first[key]}); keep one", line
                )
            first[key] = line
            yield key, value_node


def _refuse_tag(node: yaml.Node) -> None:
    if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        raise YamlTextError(f"the tag {node.tag} is not read here", node.start_mark.line + 1)


def _scalar(node: yaml.ScalarNode) -> Any:
    """The value of a scalar by YAML 1.2's core schema; quoted text stays text."""
    text, line = str(node.value), node.start_mark.line + 1
    if node.tag != _UNTAGGED:
        raise YamlTextError(f"the tag {node.tag} is not read here", line)
    if node.style is not None:
        return text
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    return _number(text, line)


def _number(text: str, line: int) -> int | float | str:
    """A plain scalar as a number where it is one."""
    if _RADIX.fullmatch(text):
        return int(text, 0)
    if _INT.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits.startswith("0"):
            raise YamlTextError(
                f"{text} has a leading zero and could be decimal or octal; write "
                f"{digits.lstrip('0') or '0'}, 0o… for octal, or quote it as text: '{text}'",
                line,
            )
        if len(digits) > 40:
            raise YamlTextError(f"a number of {len(digits)} digits is not sensible", line)
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NON_FINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def read_yaml_file(path: Path) -> tuple[Any, dict[KeyPath, Place]]:
    """The value in the file at `path`, and where each key stands.

    Raises:
        OSError: the file cannot be read.
        YamlTextError: it is not UTF-8 or not YAML accepted here.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlTextError(f"not UTF-8 at byte {error.start}; save it as UTF-8") from error
    if path.suffix == ".json":
        return _json_value(text), {(): Place(str(path))}
    value, lines = parse_yaml(text)
    return value, {p: Place(f"{path}:{line}", raw) for p, (line, raw) in lines.items()}


def _json_value(text: str) -> Any:
    """The value of a JSON file, such as the `config.json` of a run."""
    try:
        return json.loads(text, object_pairs_hook=_no_repeats)
    except json.JSONDecodeError as error:
        raise YamlTextError(f"not JSON: {error.msg}", error.lineno) from error


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise YamlTextError(f"{', '.join(twice)} stands twice; keep one")
    return found


def read_yaml_value(text: str) -> Any:
    """The value of an override's right side; text that YAML would cut or bend is refused.

    Raises:
        YamlTextError: broken YAML, or part of the text would silently be lost as a comment.
    """
    hint = "; put the value in quotes inside the argument, as in 'key=\"text: more\"'"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise YamlTextError("the value is not UTF-8") from error
    try:
        value, lines = parse_yaml(text)
    except YamlTextError as error:
        reads_ok = any(word in error.message for word in ("leading zero", "twice", "the tag"))
        raise YamlTextError(error.message + ("" if reads_ok else hint)) from error
    typed = lines.get((), (0, None))[1]
    quoted = text.strip()[:1] in ("'", '"', "|", ">")
    if not quoted and typed is not None and typed != text.strip():
        raise YamlTextError(f"only {typed!r} would be kept of {text!r}" + hint)
    return value
