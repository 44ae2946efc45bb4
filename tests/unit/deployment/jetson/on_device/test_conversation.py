"""The turn loop against a scripted double of the model server's protocol: replies in order.

The real server is met in `test_serve.py`.
"""

import copy
import json
import pickle

import pytest

from deployment.jetson.on_device.conversation import (
    AgentSettings,
    RequestError,
    as_chunks,
    complete,
    normalise_messages,
)

SETTINGS = AgentSettings(
    name="agent",
    system_prompt=None,
    special_strings=("<|im_start|>", "<|im_end|>"),
    normaliser=None,
    tools=("calc",),
    max_turns=3,
    max_new_tokens=64,
    sampling={"temperature": 0.0, "repeat_penalty": 1.0},
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
USER = [{"role": "user", "content": "34*7-52=?"}]


def _call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALC = _call("calc", expression="34*7-52")


class Script:
    """Answers with the given texts in order and keeps what it was asked."""

    def __init__(self, *texts):
        self.texts, self.asked = list(texts), []

    def __call__(self, body):
        self.asked.append(copy.deepcopy(body))
        text, finish = self.texts.pop(0), "stop"
        if isinstance(text, tuple):
            text, finish = text
        return {
            "choices": [{"message": {"content": text}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 4},
        }


def _with(**changes):
    return AgentSettings(**{**SETTINGS.__dict__, **changes})


def _message(reply):
    return reply["choices"][0]["message"]


def test_tool_call_is_answered_and_the_answer_returned():
    script = Script(CALC, "186")
    reply = complete({"messages": USER}, SETTINGS, script)
    assert _message(reply) == {"role": "assistant", "content": "186"}
    assert script.asked[1]["messages"] == [
        USER[0],
        {"role": "assistant", "content": CALC},
        {"role": "tool", "content": "186", "tool_call_id": "call_2"},
    ]
    assert reply["usage"] == {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_the_servers_own_defaults_never_apply():
    script = Script("5")
    complete({"messages": USER}, SETTINGS, script)
    assert script.asked[0]["repeat_penalty"] == 1.0
    assert script.asked[0]["temperature"] == 0.0
    assert script.asked[0]["max_tokens"] == 64
    assert "tools" not in script.asked[0], "training rendered no tool list"


def test_client_sampling_overrides():
    script = Script("5")
    request = {"messages": USER, "temperature": 0.7, "seed": 3, "stop": "\n", "max_tokens": 5}
    complete(request, SETTINGS, script)
    asked = script.asked[0]
    assert (asked["temperature"], asked["seed"], asked["stop"]) == (0.7, 3, ["\n"])
    assert asked["max_tokens"] == 5


def test_malformed_call_and_tool_error_go_back_to_the_model():
    script = Script("<tool_call>{", _call("calc", expression="1/2"), "no")
    reply = complete({"messages": USER}, SETTINGS, script)
    observations = [m["content"] for m in script.asked[2]["messages"] if m["role"] == "tool"]
    assert observations[0].startswith("error: ")
    assert observations[1] == "error: only integers, + - * and parentheses"
    assert _message(reply)["content"] == "no"


def test_turns_are_bounded():
    script = Script(*[CALC] * 9)
    reply = complete({"messages": USER}, SETTINGS, script)
    assert len(script.asked) == 3
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["rl_pipeline"]["stopped"] == "max_turns"


def test_token_budget_spans_turns():
    script = Script(CALC, "186")
    reply = complete({"messages": USER, "max_tokens": 6}, SETTINGS, script)
    assert [a["max_tokens"] for a in script.asked] == [6, 2]
    assert _message(reply)["content"] == "186"


def test_spent_budget_stops():
    script = Script(CALC, "186")
    reply = complete({"messages": USER, "max_completion_tokens": 4}, SETTINGS, script)
    assert len(script.asked) == 1
    assert reply["rl_pipeline"]["stopped"] == "max_tokens"


def test_cut_off_turn_is_not_taken_for_a_call():
    """As in training: a truncated turn ends the episode, even when a call stands in it."""
    script = Script((CALC, "length"))
    reply = complete({"messages": USER}, SETTINGS, script)
    assert len(script.asked) == 1
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_tool_of_the_client_comes_back_untouched():
    script = Script(_call("weather", city="Zürich", days=[1, 2]))
    reply = complete({"messages": USER, "tools": [WEATHER]}, SETTINGS, script)
    message = _message(reply)
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"city": "Zürich", "days": [1, 2]}
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert script.asked[0]["tools"] == [WEATHER]


def test_an_owned_tool_in_the_request_stays_owned():
    script = Script(CALC, "186")
    calc = {"type": "function", "function": {"name": "calc"}}
    reply = complete({"messages": USER, "tools": [calc]}, SETTINGS, script)
    assert _message(reply)["content"] == "186"
    assert "tools" not in script.asked[0]


def test_both_kinds_in_one_answer():
    script = Script(CALC, _call("weather", city="Bern"))
    reply = complete({"messages": USER, "tools": [WEATHER]}, SETTINGS, script)
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    roles = [m["role"] for m in reply["rl_pipeline"]["messages"]]
    assert roles == ["assistant", "tool", "assistant"]


def test_tool_choice_none_runs_nothing():
    script = Script(CALC)
    reply = complete({"messages": USER, "tool_choice": "none"}, SETTINGS, script)
    assert _message(reply)["content"] == CALC


def test_bundle_without_tools():
    reply = complete({"messages": USER}, _with(tools=()), Script(CALC))
    assert _message(reply)["content"] == CALC


def test_the_clients_tool_calls_become_the_policys_text():
    function = {"name": "calc", "arguments": '{"expression": "34*7-52"}'}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]},
        {"role": "tool", "tool_call_id": "x", "content": "186"},
    ]
    clean = normalise_messages(history, SETTINGS)
    assert clean[1] == {"role": "assistant", "content": CALC}
    assert clean[2] == {"role": "tool", "content": "186", "tool_call_id": "call_2"}


def test_system_prompt_is_put_first_once():
    settings = _with(system_prompt="Be brief.")
    assert normalise_messages(USER, settings)[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "Mine."}, *USER]
    assert [m["content"] for m in normalise_messages(own, settings)] == [
        "Mine.",
        USER[0]["content"],
    ]


def test_special_strings_are_taken_out_of_every_role():
    for role in ("system", "user", "assistant", "tool"):
        clean = normalise_messages([{"role": role, "content": "a<|im_end|>b"}], SETTINGS)
        assert clean[0]["content"] == "a<\u200b|im_end|>b"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "34*7"}, {"type": "text", "text": "-52=?"}]
    assert normalise_messages([{"role": "user", "content": parts}], SETTINGS) == USER


def test_normaliser_runs_before_cleaning():
    """U+212A KELVIN SIGN is K after NFC: it must not become a special string afterwards."""
    settings = _with(normaliser="NFC", special_strings=("<|K|>",))
    clean = normalise_messages([{"role": "user", "content": "<|\u212a|> e\u0301"}], settings)
    assert clean[0]["content"] == "<\u200b|K|> \u00e9"


@pytest.mark.parametrize(
    "request_",
    [
        None,
        [],
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"role": "function", "content": ""}]},
        {"messages": [{"role": ["user"], "content": ""}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "tool_calls": 3}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": USER, "temperature": "hot"},
        {"messages": USER, "temperature": float("nan")},
        {"messages": USER, "temperature": float("inf")},
        {"messages": USER, "temperature": 10**400},
        {"messages": USER, "temperature": True},
        {"messages": USER, "temperature": -1},
        {"messages": USER, "top_k": 1.5},
        {"messages": USER, "max_tokens": 0},
        {"messages": USER, "max_tokens": 2.5},
        {"messages": USER, "max_tokens": True},
        {"messages": USER, "stop": [""]},
        {"messages": USER, "stop": ["a"] * 9},
        {"messages": USER, "stop": 3},
        {"messages": USER, "n": 2},
        {"messages": USER, "tools": {"a": 1}},
        {"messages": USER, "tools": [3]},
        {"messages": USER, "tools": [{"function": {"name": 3}}]},
        {"messages": USER, "tool_choice": "required"},
        {"messages": USER, "response_format": {"type": "json_object"}},
        {"messages": USER, "logprobs": True},
    ],
)
def test_bad_requests_never_reach_the_model(request_):
    with pytest.raises(RequestError) as caught:
        complete(request_, SETTINGS, Script())
    assert caught.value.status == 400
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.status) == (str(caught.value), 400)


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{"message": None}]}])
def test_a_server_that_answers_nonsense_is_a_502(reply):
    with pytest.raises(RequestError) as caught:
        complete({"messages": USER}, SETTINGS, lambda body: reply)
    assert caught.value.status == 502


def test_chunks_of_a_client_tool_call():
    script = Script(_call("weather", city="Bern"))
    chunks = as_chunks(complete({"messages": USER, "tools": [WEATHER]}, SETTINGS, script))
    assert chunks[1]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert len({c["id"] for c in chunks}) == 1
