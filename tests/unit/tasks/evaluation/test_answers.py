"""Answers are drawn with the seeds promised and graded by the one verifier."""

import pytest

from configs.schema.evaluation import EvaluationSampling
from configs.schema.model import ScratchModel
from tasks.environments import tools_named
from tasks.environments.row import Row
from tasks.evaluation.answers import (
    answer_greedily,
    answer_problems,
    answer_seed,
    episode_tasks,
    same_answer,
)
from tasks.evaluation.metrics import evaluate
from tasks.rewards.verdict import Outcome
from tasks.sampling.episode import turn_seed

ONE = EvaluationSampling(samples=1, max_new_tokens=64, max_turns=2)
TOOLS = tools_named(["calc"])


def row(answer="7", kind="number", row_id="r", prompt="12+30=?"):
    return Row(id=row_id, prompt=prompt, answer=answer, answer_kind=kind, band="easy")


def asked(engine, renderer, problem, tools=None):
    (record,) = answer_problems(engine, [problem], renderer, tools or {}, ONE)
    return record


@pytest.mark.parametrize(
    ("gold", "reply", "outcome"),
    [
        ("29", "the total cost is $29.00.", Outcome.CORRECT),
        ("72", "72 clips, altogether.", Outcome.CORRECT),
        ("1234", "1,234", Outcome.CORRECT),
        ("-3", "-3", Outcome.CORRECT),
        ("-3", "3", Outcome.WRONG),
        ("7", ",", Outcome.NO_ANSWER),
        ("7", "", Outcome.NO_ANSWER),
        ("7", "I do not know", Outcome.NO_ANSWER),
    ],
)
def test_a15_the_reward_normaliser_grades_evaluation(
    engine_that_says, renderer, gold, reply, outcome
):
    record = asked(engine_that_says(reply), renderer, row(gold))
    assert record.outcome is outcome
    assert (record.extracted is None) == (outcome is Outcome.NO_ANSWER)


@pytest.mark.parametrize(
    "reply",
    [
        "<think>so far 3+4=7",
        "3+4=7",  # cut off without any thinking: what it shows may be half a number
        "<think>maybe 7</think> The answer is 7",
        "<think>\\boxed{7}",
        '<tool_call>{"name": "calc", "arguments": {"expression": "7',
    ],
)
def test_a16_cut_off_is_no_answer_and_counted_as_truncated(engine_that_says, renderer, reply):
    record = asked(engine_that_says(reply, cut_off=True), renderer, row("7"), TOOLS)
    assert record.outcome is Outcome.NO_ANSWER
    assert record.extracted is None
    assert record.truncated
    result = evaluate([record])
    assert (result["accuracy"], result["truncated_share"]) == (0.0, 1.0)


@pytest.mark.parametrize("reply", ["<think>so far 3+4=7", "<think>\\boxed{7}</think>"])
def test_a16_thinking_alone_is_no_answer_even_when_it_ended(engine_that_says, renderer, reply):
    record = asked(engine_that_says(reply), renderer, row("7"))
    assert record.outcome is Outcome.NO_ANSWER
    assert not record.truncated


def test_a16_a_tool_call_left_hanging_is_no_answer(engine_that_says, renderer):
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "7"}}</tool_call>'
    record = asked(engine_that_says(call), renderer, row("7"), TOOLS)  # calls again on each turn
    assert record.outcome is Outcome.NO_ANSWER
    assert (record.turns, record.tool_calls) == (2, 2)


def test_tool_call_is_answered_and_its_result_said(engine_that_says, renderer):
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "12+30"}}</tool_call>'

    def reply(prompt, seed):
        return ("42", False) if "tool\n42" in prompt else (call, False)

    record = asked(engine_that_says(reply), renderer, row("42"), TOOLS)
    assert record.outcome is Outcome.CORRECT
    assert [m["role"] for m in record.messages] == ["user", "assistant", "tool", "assistant"]
    assert (record.tool_calls, record.tool_errors, record.turns) == (1, 0, 2)


def test_tool_error_is_counted(engine_that_says, renderer):
    call = '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'

    def reply(prompt, seed):
        return ("42", False) if "tool\nerror" in prompt else (call, False)

    record = asked(engine_that_says(reply), renderer, row("42"), TOOLS)
    assert (record.tool_calls, record.tool_errors) == (1, 1)


def test_a13_gold_that_does_not_parse_is_unscored_not_correct(engine_that_says, renderer):
    record = asked(engine_that_says("banana 5"), renderer, row("Anya climbs one floor"))
    assert record.outcome is Outcome.UNSCORED
    assert not record.correct
    assert record.extracted == "5"  # the reply was fine; the gold was not
    assert evaluate([record])["accuracy"] == 0.0


def test_equal_answers_in_other_dress_are_one_answer(engine_that_says, renderer):
    said = ["29", "$29.00", "it is 29."]
    problem = row("29")
    seeds = {turn_seed(answer_seed(1234, "r", s), 0): said[s] for s in range(3)}
    engine = engine_that_says(lambda prompt, seed: (seeds[seed], False))
    sampling = ONE.model_copy(update={"samples": 3})
    records = answer_problems(engine, [problem], renderer, {}, sampling)
    assert {r.normalised for r in records} == {"29"}
    assert evaluate(records)["stability"] == 1.0


@pytest.mark.parametrize(
    ("kind", "first", "second", "same"),
    [
        ("number", "29", "29.00", True),
        ("number", "033", "33", True),
        ("code", "033", "33", False),
        ("text", "Paris", "paris", True),
        ("number", "-3", "3", False),
        ("number", "1/3", "0.33", False),
    ],
)
def test_same_answer_follows_the_kind(kind, first, second, same):
    assert same_answer(kind, first, second) is same


def test_seeds_depend_on_seed_row_and_sample_only():
    few = episode_tasks([row(row_id="b")], EvaluationSampling(samples=2))
    many = episode_tasks([row(row_id=i) for i in "abc"], EvaluationSampling(samples=4))
    by_id = {task.rollout_id: task.seed for task in many}
    assert [task.seed for task in few] == [by_id["b/0"], by_id["b/1"]]
    assert len({task.seed for task in many}) == 12
    assert answer_seed(1, "b", 0) != answer_seed(2, "b", 0)
    assert answer_seed(1, "a/1", 0) != answer_seed(1, "a", 10)


def test_chunks_do_not_change_answers_or_order(engine_that_says, renderer):
    problems = [row(str(i), row_id=f"r{i}", prompt=f"{i}+0=?") for i in range(5)]

    def reply(prompt, seed):
        return str(seed % 7), False

    sampling = ONE.model_copy(update={"samples": 2})
    whole = answer_problems(engine_that_says(reply), problems, renderer, {}, sampling)
    told = []
    parts = answer_problems(
        engine_that_says(reply),
        problems,
        renderer,
        {},
        sampling,
        progress=lambda done, total: told.append((done, total)),
        at_once=3,
    )
    assert parts == whole
    assert [(r.row_id, r.sample) for r in parts] == [(f"r{i}", s) for i in range(5) for s in (0, 1)]
    assert told == [(3, 10), (6, 10), (9, 10), (10, 10)]


def test_answer_greedily_gives_one_greedy_answer_each(engine_that_says, renderer):
    engine = engine_that_says(lambda prompt, seed: ("7" if "2+5" in prompt else "8", False))
    problems = [row("7", row_id="a", prompt="2+5=?"), row("7", row_id="b", prompt="3+4=?")]
    sampling = EvaluationSampling(samples=4, temperature=1.0)
    records = answer_greedily(engine, problems, renderer, {}, sampling)
    assert [(r.row_id, r.sample, r.correct) for r in records] == [("a", 0, True), ("b", 0, False)]
    assert {r.params.temperature for r in engine.requests} == {0.0}
    assert len(engine.requests) == 2


def test_real_model_draws_the_same_twice_and_other_samples_differ(renderer, tokenizer):
    from tasks.models.scratch import build_model
    from tasks.sampling.transformers_engine import TransformersEngine

    model = build_model(
        ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, ffn_size=32), tokenizer, seed=3
    )
    engine = TransformersEngine(model, end_of_turn_id=renderer.end_of_turn_id, max_length=128)
    sampling = EvaluationSampling(samples=3, max_new_tokens=8)
    problems = [row(row_id="a"), row(row_id="b", prompt="1+1=?")]
    first = answer_problems(engine, problems, renderer, TOOLS, sampling)
    assert answer_problems(engine, problems, renderer, TOOLS, sampling) == first
    alone = answer_problems(engine, problems[1:], renderer, TOOLS, sampling)
    assert alone == first[3:]  # the same draws in another batch
    assert len({r.messages[-1]["content"] for r in first[:3]}) == 3
