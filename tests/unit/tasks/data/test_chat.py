"""Chat messages become the project's own."""

import pytest

from tasks.data.chat import ChatShapeError, read_chat

USER = {"role": "user", "content": "34*7?"}


def test_system_prompt_and_reply_are_told_apart():
    chat = read_chat([{"role": "system", "content": "Be brief."}, USER, _said("238")])
    assert (chat.system, chat.prompt, chat.reply) == ("Be brief.", "34*7?", "238")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


def _said(text):
    return {"role": "assistant", "content": text}


def test_openai_tool_calls_take_the_text_form():
    call = {"function": {"name": "calc", "arguments": '{"expression": "34*7"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = read_chat([USER, asked, {"role": "tool", "content": "238"}, _said("238")])
    assert chat.messages[1]["content"] == (
        '<tool_call>{"name": "calc", "arguments": {"expression": "34*7"}}</tool_call>'
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "text",
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": ["part"]}],
        [_said("first"), USER],
        [USER, _said("a"), USER, _said("b")],
        [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        [
            USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        ],
    ],
)
def test_what_is_no_conversation(value):
    with pytest.raises(ChatShapeError):
        read_chat(value)


def test_an_unanswered_prompt_has_no_reply():
    assert read_chat([USER]).reply is None
