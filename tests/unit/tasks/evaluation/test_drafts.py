"""Greedy answers that another model gave: confirmed where this one would say the same, else played.

The answers must be those of playing every episode; only the work is less.
"""

import pytest

from configs.schema.evaluation import EvaluationSampling
from tasks.environments import tools_named
from tasks.environments.row import Row
from tasks.evaluation.answers import answer_greedily

SAMPLING = EvaluationSampling(samples=3, temperature=1.0, max_new_tokens=64, max_turns=2)
TOOLS = tools_named(["calc"])
CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "12+30"}}</tool_call>'


def problems(count):
    return [
        Row(id=f"r{i}", prompt=f"{i}+30=?", answer="42", answer_kind="number", band="easy")
        for i in range(count)
    ]


def calls_then_says(answers):
    """Calls the tool first, then says `answers[problem]` (42 where nothing else is said)."""

    def reply(prompt, _seed):
        if "</tool_call>" not in prompt:
            return CALL, False
        problem = int(prompt.split("+30=?")[0].split()[-1])
        return answers.get(problem, "42"), False

    return reply


class Confirming:
    """A scripted engine that can be asked what it would choose, and counts both."""

    def __init__(self, engine):
        self._engine = engine
        self.asked, self.played = 0, 0
        self.policy_version, self.max_length = engine.policy_version, engine.max_length

    def generate(self, requests):
        self.played += len(requests)
        return self._engine.generate(requests)

    def chooses(self, sequences, sampled):
        self.asked += len(sequences)
        return [self._same(list(ids), mask) for ids, mask in zip(sequences, sampled, strict=True)]

    def _same(self, ids, mask):
        """Play every sampled span from its prefix and compare."""
        from tasks.sampling.types import GenerateRequest, SamplingParams

        place = 0
        while True in mask[place:]:
            start = mask.index(True, place)
            end = next((t for t in range(start, len(ids)) if not mask[t]), len(ids))
            request = GenerateRequest("x", tuple(ids[:start]), SamplingParams(0.0, 64), 0)
            (done,) = self._engine.generate([request])
            if list(done.token_ids) != ids[start:end]:
                return False
            place = end
        return True


@pytest.fixture
def answer(engine_that_says, renderer):
    """`(what the model says, drafts, …)` → (records, engine)."""

    def run(answers, drafts, rows=None, **settings):
        engine = Confirming(engine_that_says(calls_then_says(answers)))
        records = answer_greedily(
            engine, rows or problems(12), renderer, TOOLS, SAMPLING, drafts=drafts, **settings
        )
        return records, engine

    return run


def outcomes(records):
    return [(r.row_id, r.outcome, r.extracted, r.tokens, r.messages) for r in records]


def test_the_first_model_plays_and_leaves_its_drafts(answer):
    drafts = {}
    records, engine = answer({}, drafts)
    assert (engine.asked, engine.played) == (0, 24)
    assert list(drafts) == [f"r{i}/0" for i in range(12)]
    assert [r.row_id for r in records] == [f"r{i}" for i in range(12)]


@pytest.mark.parametrize("other", [{}, {3: "41"}, {0: "x", 5: "41", 11: "7"}])
def test_answers_are_those_of_playing_everything(other, answer):
    drafts = {}
    answer({}, drafts)
    before = dict(drafts)
    alone, played = answer(other, None)
    records, engine = answer(other, drafts)
    assert outcomes(records) == outcomes(alone)
    assert records == alone
    assert played.played == 24
    assert engine.asked == 12 and engine.played == 2 * len(other)  # both turns of what differs
    assert drafts == before  # the first model's stay


def test_a_model_that_mostly_differs_is_not_asked_for_long(answer):
    drafts = {}
    answer({}, drafts)
    other = dict.fromkeys(range(12), "41")
    records, engine = answer(other, drafts, at_once=4)
    assert engine.asked == 4 and engine.played == 24
    assert records == answer(other, None)[0]


def test_problems_without_a_draft_are_played_and_added(answer):
    drafts = {}
    answer({}, drafts, rows=problems(5))
    records, engine = answer({}, drafts, at_once=6)
    assert (engine.asked, engine.played) == (5, 14) and len(drafts) == 12
    assert records == answer({}, None)[0]


def test_without_problems_there_are_no_answers(engine_that_says, renderer):
    engine = Confirming(engine_that_says("42"))
    assert answer_greedily(engine, [], renderer, TOOLS, SAMPLING, drafts={}) == []
