import json

import pytest

from deployment.jetson.errors import MissingInputError
from deployment.jetson.golden import WIDE_MARGIN_NATS, greedy_turn, opened, read_prompts
from deployment.jetson.on_device.smoke import SmokeError, check_ids, check_turn, tokenizer
from tasks.artifacts import write_jsonl


def _user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def golden(package):
    return json.loads((package.bundle / "golden_prompts.json").read_bytes())


def test_recorded_turns_are_those_of_transformers(golden, stages):
    """Prompt ids and greedy tokens equal what the trainer's own model says, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer_ = AutoTokenizer.from_pretrained(stages.policy)
    model = AutoModelForCausalLM.from_pretrained(stages.policy)
    for prompt in golden["prompts"]:
        for turn in prompt["turns"]:
            assert tokenizer_(turn["prompt_text"])["input_ids"] == turn["prompt_ids"]
            ids = torch.tensor([turn["prompt_ids"]])
            out = model.generate(ids, do_sample=False, max_new_tokens=64)[0, ids.shape[1] :]
            assert out.tolist() == [*turn["generated_ids"], tokenizer_.eos_token_id]


def test_conversation_with_a_tool_has_two_turns(golden):
    prompts = {p["messages"][0]["content"]: p for p in golden["prompts"]}
    with_tool = prompts["34*7-52=?"]
    assert [t["text"] for t in with_tool["turns"]][1] == "186"
    assert with_tool["answer"] == "186"
    assert len(prompts["2+3=?"]["turns"]) == 1
    assert golden["added_bos_id"] is None


def test_margins_decide_what_is_sure(golden):
    for prompt in golden["prompts"]:
        for turn in prompt["turns"]:
            assert len(turn["margins"]) == len(turn["generated_ids"]) + 1, "the end counts"
            wide = all(m >= WIDE_MARGIN_NATS for m in turn["margins"])
            assert turn["compare"] == ("tokens" if wide else "prefix")
            assert wide == (turn["sure_tokens"] == len(turn["generated_ids"]))


def test_limit_of_tokens(stages):
    with opened(stages.quantised / "Q8_0.gguf", 64) as llama:
        turn = greedy_turn(llama, [5, 6, 7], 1)
        assert (len(turn.margins), len(turn.ids) + turn.finished) == (1, 1)
        assert greedy_turn(llama, [5] * 63, 1).margins, "the last place of the context is used"


def test_prompts_do_not_depend_on_order_or_repeats(tmp_path):
    a, b = (
        {"messages": [_user("a"), {"role": "assistant", "content": "x"}]},
        {"messages": [_user("b")]},
    )
    write_jsonl(tmp_path / "1", [a, b, a])
    write_jsonl(tmp_path / "2", [b, a])
    assert read_prompts(tmp_path / "1", 9, None) == read_prompts(tmp_path / "2", 9, None)
    assert len(read_prompts(tmp_path / "1", 1, None)) == 1


def test_our_own_system_prompt_is_left_to_the_renderer(tmp_path):
    system = {"role": "system", "content": "S"}
    write_jsonl(tmp_path / "1", [{"messages": [system, _user("a")]}])
    assert read_prompts(tmp_path / "1", 9, "S") == [[_user("a")]]
    assert read_prompts(tmp_path / "1", 9, "other") == [[system, _user("a")]]


def test_rollouts_without_a_conversation(tmp_path):
    write_jsonl(tmp_path / "1", [{"messages": []}])
    with pytest.raises(MissingInputError, match="holds no conversation"):
        read_prompts(tmp_path / "1", 9, None)


TURN = {"generated_ids": [1, 2, 3], "sure_text": "ab"}


def _never(text):
    raise AssertionError("ids are compared only where all of them are sure")


def test_near_tie_is_compared_up_to_the_tie_only():
    turn = {**TURN, "compare": "prefix"}
    assert check_turn("ab and another end", turn, _never, "x") is False
    with pytest.raises(SmokeError, match="'axb'"):
        check_turn("axb", turn, _never, "x")


def test_text_whose_ids_are_not_its_own_is_compared_as_text():
    turn = {**TURN, "compare": "text"}
    assert check_turn("ab", turn, _never, "x") is True
    with pytest.raises(SmokeError):
        check_turn("abc", turn, _never, "x")


@pytest.mark.parametrize(("found", "at"), [([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)])
def test_first_different_token_is_named(found, at):
    with pytest.raises(SmokeError, match=f"token {at} is"):
        check_ids(found, [1, 2, 3], "x")


def test_a_bos_that_the_server_adds_is_taken_off_once():
    def post(path, body):
        return {"tokens": [7, 7, 1]}

    assert tokenizer(post, 7)("x") == [7, 1]
    assert tokenizer(post, None)("x") == [7, 7, 1]
