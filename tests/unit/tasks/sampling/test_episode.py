"""Episodes token by token: what was sampled, what was observed, and how they end."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from configs.schema.rl_tools import ToolSettings
from tasks.environments import tools_named
from tasks.environments.tool_runner import ToolRunner
from tasks.environments.toolcall import render_tool_call
from tasks.sampling.answers import (
    AnswerCountError,
    MissingLogprobsError,
    NonFiniteLogprobError,
    WrongLengthError,
)
from tasks.sampling.episode import EpisodeTask, play_episode, run_episodes, turn_seed
from tasks.sampling.errors import AnswerRefusedError
from tasks.sampling.types import (
    Completion,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    StopReason,
    VersionSpan,
)

CALL = render_tool_call("calc", {"expression": "3+4"})
PARAMS = SamplingParams(0.7, 100)
LOGPROBS = tuple(-0.1 * (i + 1) for i in range(200))


class Script:
    """An engine that says its lines, turn by turn, in ids; versions count its calls."""

    policy_version = PolicyVersion(0, 0)

    def __init__(self, turns: Sequence[list[tuple[list[int], StopReason]]], max_length=512):
        self._turns = list(turns)
        self.max_length = max_length
        self.asked: list[list[GenerateRequest]] = []

    def generate(self, requests):
        self.asked.append(list(requests))
        lines = self._turns[len(self.asked) - 1]
        return [
            Completion(
                r.request_id, tuple(ids), LOGPROBS[: len(ids)], stop,
                PolicyVersion(0, len(self.asked)),
            )
            for r, (ids, stop) in zip(requests, lines, strict=True)
        ]  # fmt: skip


@pytest.fixture
def say(tiny_renderer):
    """Ids of a finished turn, or of one that is cut off before its end."""

    def build(text: str, stop: StopReason = StopReason.END_OF_TURN):
        ids = tiny_renderer.encode(text)
        return (ids + [tiny_renderer.end_of_turn_id] * (stop is StopReason.END_OF_TURN), stop)

    return build


@pytest.fixture
def play(tiny_renderer):
    """Play one episode per line of the first turn; gives the rollouts and the engine."""

    def run(*turns, max_turns=3, tools=("calc",), max_length=512, params=PARAMS):
        engine = Script(turns, max_length)
        tasks = [
            EpisodeTask(f"e{i}", f"row{i}", "g", ({"role": "user", "content": f"{i}+4=?"},), seed=i)
            for i in range(len(turns[0]))
        ]
        rollouts = run_episodes(
            engine, tasks, tiny_renderer, tools_named(tools), max_turns=max_turns, params=params
        )
        return rollouts, engine

    return run


def spans(rollout) -> list[tuple[int, int]]:
    return [(t.start, t.end) for t in rollout.turns]


def test_one_turn(play, say, tiny_renderer):
    (rollout,), engine = play([say("0+4=4")])
    prompt = tiny_renderer.prompt_ids([{"role": "user", "content": "0+4=?"}])
    said, _ = say("0+4=4")
    assert rollout.token_ids == (*prompt, *said)
    assert rollout.action_mask == (False,) * len(prompt) + (True,) * len(said)
    assert rollout.sampler_logprobs[: len(prompt)] == (0.0,) * len(prompt)
    assert rollout.sampler_logprobs[len(prompt) :] == tuple(
        -0.1 * (i + 1) for i in range(len(said))
    )
    assert spans(rollout) == [(len(prompt), len(prompt) + len(said))]
    assert (rollout.final_text, rollout.truncated, rollout.tool_calls) == ("0+4=4", False, 0)
    assert rollout.temperature == 0.7 and rollout.sampled_tokens == len(said)
    assert [m["role"] for m in rollout.messages] == ["user", "assistant"]
    assert (rollout.rollout_id, rollout.row_id, rollout.group_id) == ("e0", "row0", "g")
    assert len(engine.asked) == 1 and engine.asked[0][0].params is PARAMS


def test_a_tool_turn_is_answered_and_only_the_policys_tokens_are_actions(play, say, tiny_renderer):
    (rollout,), engine = play([say(CALL)], [say("7")])
    conversation = [
        {"role": "user", "content": "0+4=?"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "7"},
    ]
    ids, mask = tiny_renderer.supervised(conversation)  # SFT and RL see the same ids
    assert (list(rollout.token_ids), list(rollout.action_mask)) == (ids, mask)
    assert list(rollout.messages) == conversation
    assert (rollout.final_text, rollout.tool_calls, rollout.tool_errors) == ("7", 1, 0)
    for start, end in spans(rollout):
        assert all(rollout.action_mask[start:end])
    assert sum(end - start for start, end in spans(rollout)) == sum(rollout.action_mask)
    assert [t.policy_version.step for t in rollout.turns] == [1, 2]
    assert rollout.oldest_version == PolicyVersion(0, 1)
    second = engine.asked[1][0]
    assert second.prompt_ids == rollout.token_ids[: rollout.turns[1].start]
    assert [a[0].seed for a in engine.asked] == [turn_seed(0, 0), turn_seed(0, 1)]


def test_sampled_ids_are_never_tokenised_again(play, say, tiny_renderer):
    # The call spelt byte by byte decodes to the same text, and its ids are not the tokenizer's own.
    odd = [tiny_renderer.tokenizer.convert_tokens_to_ids(c) for c in CALL.replace(" ", "Ġ")]
    assert tiny_renderer.decode(odd) == CALL and odd != tiny_renderer.encode(CALL)
    odd.append(tiny_renderer.end_of_turn_id)
    (rollout,), _ = play([(odd, StopReason.END_OF_TURN)], [say("7")])
    first = rollout.turns[0]
    assert list(rollout.token_ids[first.start : first.end]) == odd
    assert rollout.messages[2] == {"role": "tool", "content": "7"}


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        ("<tool_call>{", "error: expected exactly one closed <tool_call> block"),
        ("<tool_call>{}</tool_call>", 'error: expected exactly the keys "name" and "arguments"'),
        (CALL + CALL, "error: expected exactly one closed <tool_call> block"),
        (render_tool_call("search", {}), "error: unknown tool; have calc"),
        (render_tool_call("calc", {"expression": "1/0"}), "error: only integers"),
        (render_tool_call("calc", {}), "error: expected"),
    ],
)
def test_a_call_that_fails_is_answered_by_an_error(play, say, text, observation):
    (rollout,), _ = play([say(text)], [say("7")])
    assert rollout.messages[2]["role"] == "tool"
    assert rollout.messages[2]["content"].startswith(observation)
    assert (rollout.tool_calls, rollout.tool_errors, len(rollout.turns)) == (1, 1, 2)
    assert rollout.final_text == "7" and not rollout.truncated


@pytest.mark.parametrize("stop", [StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL])
def test_a_turn_cut_off_ends_the_episode_even_with_a_call_in_it(play, say, stop):
    line = say(CALL, stop)
    (rollout,), engine = play([line], params=SamplingParams(0.7, len(line[0])))
    assert rollout.truncated and len(engine.asked) == 1
    assert (rollout.tool_calls, rollout.final_text) == (0, CALL)
    assert rollout.turns[-1].stop_reason is stop


def test_a_call_on_the_last_turn_is_counted_and_not_answered(play, say):
    (rollout,), engine = play([say(CALL)], [say(CALL)], max_turns=2)
    assert len(engine.asked) == len(rollout.turns) == rollout.tool_calls == 2
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.action_mask[-1] and rollout.final_text == CALL and not rollout.truncated


def test_without_tools_a_call_is_only_text(play, say):
    (rollout,), _ = play([say(CALL)], tools=())
    assert (rollout.final_text, rollout.tool_calls, len(rollout.turns)) == (CALL, 0, 1)


@pytest.mark.parametrize(("spare", "outgrown"), [(1, False), (0, True), (-5, True)])
def test_an_answer_the_context_has_no_room_for_ends_the_episode(
    play, say, tiny_renderer, spare, outgrown
):
    prompt = tiny_renderer.prompt_ids([{"role": "user", "content": "0+4=?"}])
    said, _ = say(CALL)
    talk = [{"role": "user", "content": "0+4=?"}, {"role": "assistant", "content": CALL}]
    observed = tiny_renderer.observation_ids(talk, [{"role": "tool", "content": "7"}])
    room = len(prompt) + len(said) + len(observed) + spare
    (rollout,), engine = play([say(CALL)], [say("7")], max_length=room)
    assert rollout.truncated == outgrown
    assert len(engine.asked) == len(rollout.turns) == 2 - outgrown
    assert len(rollout.token_ids) <= room + 2  # the script heeds no limit; an engine does
    assert rollout.action_mask[-1] and rollout.tool_calls == 1


def test_an_empty_turn_is_a_turn_without_tokens(play, tiny_renderer):
    (rollout,), _ = play([([], StopReason.CONTEXT_FULL)])
    assert spans(rollout)[0][0] == spans(rollout)[0][1] == len(rollout.token_ids)
    assert rollout.truncated and not any(rollout.action_mask) and rollout.final_text == ""


def test_finished_episodes_wait_while_others_go_on(play, say):
    first = [say(CALL), say("5"), say(CALL)]
    rollouts, engine = play(first, [say("7"), say(CALL)], [say("8")])
    assert [len(r.turns) for r in rollouts] == [2, 1, 3]
    assert [[r.request_id for r in asked] for asked in engine.asked] == [
        ["e0", "e1", "e2"], ["e0", "e2"], ["e2"],
    ]  # fmt: skip
    assert [r.rollout_id for r in rollouts] == ["e0", "e1", "e2"]
    for rollout in rollouts:
        lengths = {
            len(x) for x in (rollout.token_ids, rollout.action_mask, rollout.sampler_logprobs)
        }
        assert len(lengths) == 1


def test_no_task_is_no_episode(play, tiny_renderer):
    assert run_episodes(Script([]), [], tiny_renderer, {}, max_turns=2, params=PARAMS) == []


def test_turn_seeds_differ_by_episode_and_turn_and_fit_63_bits():
    seeds = {turn_seed(s, t) for s in range(50) for t in range(4)}
    assert len(seeds) == 200 and max(seeds) < 2**63
    assert turn_seed(3, 1) == turn_seed(3, 1)


class Aside:
    """The script, asked one turn at a time; it says of each whose weights it was."""

    def __init__(self, script: Script, spans=()) -> None:
        self._script, self._spans = script, spans
        self.max_length = script.max_length
        self.policy_version = PolicyVersion(0, 9)

    async def complete(self, request):
        (completion,) = self._script.generate([request])
        return replace(completion, spans=self._spans)


def alone(renderer, engine, tools: ToolRunner, **arguments):
    task = EpisodeTask("e0", "row0", "g", ({"role": "user", "content": "0+4=?"},), seed=0)
    settings = {"max_turns": 3, "params": PARAMS} | arguments
    return asyncio.run(play_episode(engine, task, renderer, tools, **settings))


@pytest.mark.parametrize(
    "turns",
    [
        [CALL, "7"],
        ["0+4=4"],
        [CALL, CALL, CALL],
        ["<tool_call>{", "7"],
    ],
)
def test_alone_an_episode_is_what_it_is_in_lockstep(play, say, tiny_renderer, turns):
    lines = [[say(text)] for text in turns]
    (together,), _ = play(*lines)
    script = Script(lines)
    tools = ToolRunner(tools_named(["calc"]))
    assert alone(tiny_renderer, Aside(script), tools) == together
    assert [request.version for (request,) in script.asked] == [None] * len(together.turns)


def test_an_episode_that_ends_on_its_weights_asks_for_them_each_turn(say, tiny_renderer):
    script = Script([[say(CALL)], [say("7")]])
    tools = ToolRunner(tools_named(["calc"]))
    alone(tiny_renderer, Aside(script), tools, version=PolicyVersion(0, 3))
    assert [request.version.step for (request,) in script.asked] == [3, 3]


def test_versions_inside_a_turn_keep_their_places_in_the_episode(say, tiny_renderer):
    said, stop = say("0+4=4")
    old, new = PolicyVersion(0, 1), PolicyVersion(0, 2)
    spans = (VersionSpan(0, 2, old), VersionSpan(2, len(said), new))
    engine = Aside(Script([[(said, stop)]]), spans)
    rollout = alone(tiny_renderer, engine, ToolRunner({}))
    start = rollout.turns[0].start
    assert rollout.turns[0].spans == (
        VersionSpan(start, start + 2, old), VersionSpan(start + 2, start + len(said), new),
    )  # fmt: skip
    assert rollout.oldest_version == old


def test_a_tool_that_never_answers_is_an_observation_and_counted(say, tiny_renderer):
    slow = ToolSettings(timeout_s=0.03, retries=0)
    tools = ToolRunner({"calc": lambda arguments: time.sleep(0.3) or "7"}, slow)
    rollout = alone(tiny_renderer, Aside(Script([[say(CALL)], [say("?")]])), tools)
    assert rollout.messages[2]["content"] == "error: no answer within 0.03 s"
    assert (rollout.tool_calls, rollout.tool_errors, rollout.tool_timeouts) == (1, 1, 1)


class Liar(Script):
    """An engine whose answers are changed on their way."""

    def __init__(self, turns, change):
        super().__init__(turns)
        self._change = change

    def generate(self, requests):
        return self._change(super().generate(requests))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda c: c[:1], AnswerCountError, "2 requests from e0 on got 1 answers"),
        (lambda c: [*c, c[0]], AnswerCountError, "2 requests from e0 on got 3 answers"),
        (lambda c: c[::-1], AnswerRefusedError, "request e0 was answered as e1"),
        (
            lambda c: [c[0], replace(c[1], logprobs=c[1].logprobs[:-1])],
            MissingLogprobsError,
            "request e1: . tokens came with . log-prob",
        ),
        (
            lambda c: [c[0], replace(c[1], logprobs=(math.nan, *c[1].logprobs[1:]))],
            NonFiniteLogprobError,
            "request e1: token 0 has log-probability nan",
        ),
        (
            lambda c: [c[0], replace(c[1], stop_reason=StopReason.MAX_TOKENS)],
            WrongLengthError,
            "request e1 ended as max_tokens after .* 100 were asked for",
        ),
    ],
)
def test_in_lockstep_too_no_answer_is_taken_unseen(tiny_renderer, say, change, error, said):
    tasks = [
        EpisodeTask(f"e{i}", "row", "g", ({"role": "user", "content": "1+4=?"},), seed=i)
        for i in range(2)
    ]
    engine = Liar([[say("5"), say("6")]], change)
    with pytest.raises(error, match=said):
        run_episodes(engine, tasks, tiny_renderer, {}, max_turns=1, params=PARAMS)
