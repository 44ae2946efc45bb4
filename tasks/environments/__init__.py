"""Prompts, tools and demonstrations; the one prompt renderer."""

from collections.abc import Mapping, Sequence

from tasks.environments.calculator_tool import SCHEMA, calc
from tasks.environments.toolcall import Tool

_TOOLS: dict[str, Tool] = {"calc": calc}
TOOL_SCHEMAS = {"calc": SCHEMA}


class UnknownToolError(KeyError):
    """The config names a tool that does not exist."""


def tools_named(names: Sequence[str]) -> Mapping[str, Tool]:
    """The tools a config names.

    Raises:
        UnknownToolError: names the key, the value and what there is.
    """
    for name in names:
        if name not in _TOOLS:
            raise UnknownToolError(f"tools={name!r} unknown; choose from {sorted(_TOOLS)}")
    return {name: _TOOLS[name] for name in names}
