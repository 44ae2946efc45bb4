"""The turn-and-tool protocol: what an assistant message asks for, and what answers it.

Standard library only, Python 3.10: this file and `calculator_tool.py` are copied into the bundle,
so RL, evaluation, parity and the device all finish a tool call with the same code.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)

Tool = Callable[[Mapping[str, object]], str]


class ToolError(ValueError):
    """A tool could not answer; its text goes back to the policy as the observation."""


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class MalformedCall:
    """Text that opens a tool call and does not finish it properly."""

    reason: str


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("duplicate key")
    return dict(pairs)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def parse_tool_call(text: str) -> "ToolCall | MalformedCall | None":
    """The call in an assistant message, `None` where there is none.

    Thinking blocks are left out; a duplicate key, trailing junk or cut-off JSON is malformed.
    """
    visible = _THINK.sub("", text)
    if "<tool_call>" not in visible:
        return None
    bodies = _CALL.findall(visible)
    if len(bodies) != 1 or visible.count("<tool_call>") != 1:
        return MalformedCall("expected exactly one closed <tool_call> block")
    try:
        value = json.loads(bodies[0], object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"not JSON: {error}")
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        return MalformedCall('expected exactly the keys "name" and "arguments"')
    if not isinstance(value["name"], str) or not isinstance(value["arguments"], dict):
        return MalformedCall('"name" must be a string and "arguments" an object')
    return ToolCall(value["name"], value["arguments"])


def render_tool_call(name: str, arguments: Mapping[str, object]) -> str:
    """The one text form of a call."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


def answer_tool_call(text: str, tools: Mapping[str, Tool]) -> "str | None":
    """The observation that answers an assistant message; `None` ends the conversation."""
    call = parse_tool_call(text)
    if call is None or not tools:
        return None
    if isinstance(call, MalformedCall):
        return f"error: {call.reason}"
    tool = tools.get(call.name)
    if tool is None:
        return f"error: unknown tool; have {', '.join(sorted(tools))}"
    try:
        return tool(call.arguments)
    except ToolError as error:
        return f"error: {error}"
