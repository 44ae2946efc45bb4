"""Reads chat `messages` in the OpenAI form, tool calls included, as the project's own messages."""

import json
from dataclasses import dataclass
from typing import Any

from tasks.environments.row import Message
from tasks.environments.toolcall import render_tool_call

ROLES = ("system", "user", "assistant", "tool")


class ChatShapeError(ValueError):
    """The value is no conversation that one prompt can open."""


@dataclass(frozen=True)
class Chat:
    """A conversation opened by one user message."""

    messages: list[Message]
    """Without the system message, which the renderer puts there."""
    prompt: str
    reply: str | None
    """The last message where the assistant said it; None where there is none to learn."""
    system: str | None


def read_chat(value: Any) -> Chat:
    """The conversation in `value`.

    Raises:
        ChatShapeError: no list of messages, an unknown role, content that is no text, or another
            number of user messages than one.
    """
    if not isinstance(value, list) or not value:
        raise ChatShapeError("messages must be a list with at least one message")
    messages = [_message(item) for item in value]
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    spoken = messages[1:] if system is not None else messages
    roles = [message["role"] for message in spoken]
    if not roles or roles[0] != "user" or roles.count("user") != 1 or "system" in roles:
        raise ChatShapeError("one user message must come first, and there must be only one")
    last = spoken[-1]
    reply = last["content"] if last["role"] == "assistant" else None
    return Chat(spoken, spoken[0]["content"], reply, system)


def _message(item: Any) -> Message:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        raise ChatShapeError(f"a message needs a role out of {', '.join(ROLES)}")
    content = item.get("content")
    calls = item.get("tool_calls")
    if calls:
        return {"role": item["role"], "content": _called(content, calls)}
    if not isinstance(content, str):
        raise ChatShapeError("content must be text")
    return {"role": item["role"], "content": content}


def _called(content: Any, calls: Any) -> str:
    """The text form of one tool call in the OpenAI form."""
    if not isinstance(calls, list) or len(calls) != 1 or not isinstance(calls[0], dict):
        raise ChatShapeError("one tool call a message")
    function = calls[0].get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatShapeError("a tool call needs function.name")
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise ChatShapeError(f"tool call arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ChatShapeError("tool call arguments must be an object")
    said = content if isinstance(content, str) else ""
    return said + render_tool_call(function["name"], arguments)
