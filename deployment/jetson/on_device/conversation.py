"""From an OpenAI-style chat request to a finished answer: the device completes tool calls itself.

Standard library only, Python 3.10. The model server is asked one turn at a time with the messages
the trainer would have rendered; a call of a tool the bundle owns is answered here, a call of a tool
the client brought goes back to the client as `tool_calls`, untouched.
"""

import json
import time
import unicodedata
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

try:
    from tasks.environments import calculator_tool
    from tasks.environments.sanitise import sanitise
    from tasks.environments.toolcall import (
        ToolCall,
        answer_tool_call,
        parse_tool_call,
        render_tool_call,
    )
except ModuleNotFoundError:  # beside this file on the device
    import calculator_tool  # type: ignore[import-not-found,no-redef]
    from sanitise import sanitise  # type: ignore[import-not-found,no-redef]
    from toolcall import (  # type: ignore[import-not-found,no-redef]
        ToolCall,
        answer_tool_call,
        parse_tool_call,
        render_tool_call,
    )

OWNED_TOOLS = {"calc": calculator_tool.calc}
"""Every tool this code can finish; the manifest names those of one bundle."""
ROLES = ("system", "user", "assistant", "tool")
RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, 1 << 20),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repeat_penalty": (0.0, 10.0),
    "seed": (0, (1 << 31) - 1),
}
"""Sampling keys a client may set, and their bounds."""
WHOLE = ("top_k", "seed")
UNSUPPORTED = ("functions", "function_call", "logprobs", "response_format", "logit_bias", "audio")
MAX_STOPS = 8


class RequestError(ValueError):
    """A request that cannot be answered; `status` is the HTTP status to send."""

    def __init__(
        self, message: str, status: int = 400, code: str = "invalid_request_error"
    ) -> None:
        super().__init__(message, status, code)
        self.message, self.status, self.code = message, status, code

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class AgentSettings:
    """What the manifest says about answering."""

    name: str
    system_prompt: "str | None"
    special_strings: "tuple[str, ...]"
    normaliser: "str | None"
    """Unicode form the tokenizer was trained on; llama.cpp does not normalise by itself."""
    tools: "tuple[str, ...]"
    max_turns: int
    max_new_tokens: int
    sampling: Mapping = field(default_factory=dict)

    @staticmethod
    def from_manifest(manifest: Mapping) -> "AgentSettings":
        """Read `prompt` and `serving` of a manifest."""
        prompt, serving = manifest["prompt"], manifest["serving"]
        return AgentSettings(
            name=manifest["name"],
            system_prompt=prompt["system_prompt"],
            special_strings=tuple(prompt["special_strings"]),
            normaliser=prompt["normaliser"],
            tools=tuple(serving["tools"]),
            max_turns=serving["max_turns"],
            max_new_tokens=serving["max_new_tokens"],
            sampling=serving["sampling"],
        )


def _content(message: Mapping, place: str) -> str:
    """Text of a message; OpenAI's list of text parts is joined, null is empty."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) else None for p in content]
        if not all(isinstance(p, str) for p in parts):
            raise RequestError(f"{place}.content: only text parts are supported")
        content = "".join(parts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{place}.content must be a string")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{place}.content holds half of a surrogate pair") from None
    return content


def _calls_as_text(calls: object, place: str) -> str:
    """An assistant message's OpenAI `tool_calls` in the text form the policy speaks."""
    if not isinstance(calls, list):
        raise RequestError(f"{place}.tool_calls must be a list")
    texts = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        try:
            name, arguments = function["name"], json.loads(function["arguments"])
        except (TypeError, KeyError, ValueError):
            raise RequestError(
                f"{place}.tool_calls: expected function.name and function.arguments (JSON text)"
            ) from None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise RequestError(f"{place}.tool_calls: the arguments must be a JSON object")
        texts.append(render_tool_call(name, arguments))
    return "".join(texts)


def normalise_messages(messages: object, settings: AgentSettings) -> "list[dict]":
    """The client's messages as the trainer would have rendered them.

    Roles are checked, special strings taken out, `tool_calls` written as text, the system prompt
    put first where none is, and every tool message given the `tool_call_id` the server insists on.

    Raises:
        RequestError: an empty list, an unknown role, or content that is not text.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    clean = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise RequestError(f"{place}.role is {role!r}; expected one of {', '.join(ROLES)}")
        content = _content(message, place)
        if role == "assistant" and message.get("tool_calls") is not None:
            content += _calls_as_text(message["tool_calls"], place)
        clean.append(_message(role, content, settings, index))
    if settings.system_prompt is not None and clean[0]["role"] != "system":
        clean.insert(0, _message("system", settings.system_prompt, settings, 0))
    return clean


def _message(role: str, content: str, settings: AgentSettings, index: int) -> dict:
    if settings.normaliser is not None:  # before cleaning: it may compose a special string
        content = unicodedata.normalize(settings.normaliser, content)
    message = {"role": role, "content": sanitise(content, settings.special_strings)}
    if role == "tool":
        message["tool_call_id"] = f"call_{index}"
    return message


def _number(key: str, value: object) -> "int | float":
    low, high = RANGES[key]
    kinds = (int,) if key in WHOLE else (int, float)
    good = isinstance(value, kinds) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # NaN and infinity fail the comparison
        raise RequestError(f"{key}={value!r}: expected a number from {low} to {high}")
    return value


def sampling_of(request: Mapping, settings: AgentSettings) -> dict:
    """Sampling settings of one turn: the bundle's, overridden by the client's.

    The model server's own defaults (repeat_penalty 1.1 among them) never apply.
    """
    chosen = dict(settings.sampling)
    for key in RANGES:
        if request.get(key) is not None:
            chosen[key] = _number(key, request[key])
    stop = request.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise RequestError("stop must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop: at most {MAX_STOPS} strings")
        chosen["stop"] = stops
    return chosen


def _budget(request: Mapping, settings: AgentSettings) -> "int | None":
    """Tokens the client allows for the whole answer; None where it names no limit."""
    value = request.get("max_completion_tokens", request.get("max_tokens"))
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise RequestError(f"max_tokens={value!r}: expected a whole number of at least 1")
    return value


def _client_tools(request: Mapping, settings: AgentSettings) -> "list[dict]":
    """Tools the client brought that the bundle does not own."""
    tools = request.get("tools") or []
    names = []
    for tool in tools if isinstance(tools, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError('tools: expected [{"type": "function", "function": {"name": …}}]')
        names.append(function["name"])
    return [t for t, name in zip(tools, names, strict=True) if name not in settings.tools]


def _refuse_unsupported(request: Mapping) -> None:
    for key in UNSUPPORTED:
        if request.get(key):
            raise RequestError(f"{key} is not supported by this server; leave it out")
    if request.get("n") not in (None, 1):
        raise RequestError(f"n={request['n']!r}: this server gives one answer")
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise RequestError('tool_choice: only "auto" and "none" are supported')


@dataclass
class _Answer:
    """One answer being made."""

    messages: "list[dict]" = field(default_factory=list)
    """What the agent added to the conversation: its turns and the observations."""
    text: str = ""
    finish: str = "stop"
    stopped: str = "end_of_turn"
    call: "ToolCall | None" = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


def _turn(reply: Mapping) -> "tuple[str, str, int, int]":
    """(text, finish reason, prompt tokens, completion tokens) of the model server's reply."""
    try:
        choice, usage = reply["choices"][0], reply["usage"]
        text = choice["message"]["content"] or ""
        return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]
    except (KeyError, IndexError, TypeError):
        raise RequestError("the model server sent no answer", 502, "upstream_error") from None


def _play(
    messages: "list[dict]",
    base: Mapping,
    budget: "int | None",
    settings: AgentSettings,
    owned: Mapping,
    foreign: "set[str]",
    ask: "Callable[[dict], dict]",
) -> _Answer:
    answer = _Answer()
    for turn in range(settings.max_turns):
        left = settings.max_new_tokens
        if budget is not None:
            left = min(left, budget - answer.completion_tokens)
        reply = ask({**base, "messages": messages + answer.messages, "max_tokens": left})
        answer.text, finish, prompt_tokens, completion_tokens = _turn(reply)
        answer.prompt_tokens += prompt_tokens
        answer.completion_tokens += completion_tokens
        index = len(messages) + len(answer.messages)
        answer.messages.append(_message("assistant", answer.text, settings, index))
        if finish == "length":
            answer.finish, answer.stopped = "length", "max_tokens"
            return answer
        call = parse_tool_call(answer.text)
        if isinstance(call, ToolCall) and call.name in foreign:
            answer.finish, answer.stopped, answer.call = "tool_calls", "client_tool", call
            return answer
        observation = answer_tool_call(answer.text, owned)
        if observation is None:
            return answer
        spent = budget is not None and answer.completion_tokens >= budget
        if turn == settings.max_turns - 1 or spent:
            answer.finish = "length"
            answer.stopped = "max_tokens" if spent else "max_turns"
            return answer
        answer.messages.append(_message("tool", observation, settings, index + 1))
    return answer


def complete(request: object, settings: AgentSettings, ask: "Callable[[dict], dict]") -> dict:
    """Answer a `/v1/chat/completions` request; `ask` sends one turn to the model server.

    The reply is OpenAI's `chat.completion`, plus `rl_pipeline`: the messages the agent added on
    the way, and why it stopped. Clients that do not know the key ignore it.

    Raises:
        RequestError: the request is wrong, or the model server failed.
    """
    if not isinstance(request, dict):
        raise RequestError("the body must be a JSON object")
    _refuse_unsupported(request)
    client_tools = _client_tools(request, settings)
    base = {**sampling_of(request, settings), "model": settings.name, "stream": False}
    if client_tools:
        base["tools"] = client_tools
    runs = request.get("tool_choice") != "none"
    owned = {name: OWNED_TOOLS[name] for name in settings.tools} if runs else {}
    foreign = {tool["function"]["name"] for tool in client_tools} if runs else set()
    messages = normalise_messages(request.get("messages"), settings)
    budget = _budget(request, settings)
    answer = _play(messages, base, budget, settings, owned, foreign, ask)
    return _response(answer, settings)


def _response(answer: _Answer, settings: AgentSettings) -> dict:
    message = {"role": "assistant", "content": answer.text}
    if answer.call is not None:
        arguments = json.dumps(dict(answer.call.arguments), ensure_ascii=False)
        function = {"name": answer.call.name, "arguments": arguments}
        call = {"id": f"call_{uuid.uuid4().hex[:12]}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": settings.name,
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish}],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
        "rl_pipeline": {"messages": answer.messages, "stopped": answer.stopped},
    }


def as_chunks(response: Mapping) -> "list[dict]":
    """The finished answer as `chat.completion.chunk`s: the role, what is said, the end."""
    choice = response["choices"][0]
    said = {key: value for key, value in choice["message"].items() if key != "role"}
    if "tool_calls" in said:
        said["tool_calls"] = [{"index": i, **c} for i, c in enumerate(said["tool_calls"])]
    head = {key: response[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    steps = [({"role": "assistant"}, None), (said, None), ({}, choice["finish_reason"])]
    return [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        for delta, finish in steps
    ]
