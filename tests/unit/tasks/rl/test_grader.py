"""Outcome, format part and weights: paid on the last turn, and unknown stays unknown."""

from dataclasses import replace

import pytest

from configs.schema.rl import Anneal, OverlongPenalty, RewardConfig
from tasks.environments.row import Row
from tasks.rl.grader import Grader, overlong, weigh
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn

ROW = Row(id="r", prompt="3+4=?", answer="7")
CODE = Row(id="c", prompt="spell it", answer="007", answer_kind="code")
BAD_GOLD = Row(id="g", prompt="?", answer="no number here")
CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "3+4"}}</tool_call>'


def said(*texts: str, row: str = "r", truncated: bool = False) -> Rollout:
    messages = [{"role": "user", "content": "3+4=?"}]
    for text in texts:
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "7"}]
    turns = tuple(
        Turn(2 * i + 1, 2 * i + 2, StopReason.END_OF_TURN, PolicyVersion(0, 0))
        for i in range(len(texts))
    )
    return Rollout(
        "0.0", row, "0", (1,) * (2 * len(texts)), (False, True) * len(texts),
        (0.0, -1.0) * len(texts), turns, 1.0, tuple(messages[:-1]), texts[-1], truncated,
    )  # fmt: skip


@pytest.fixture
def grader() -> Grader:
    return Grader({row.id: row for row in (ROW, CODE, BAD_GOLD)})


@pytest.mark.parametrize(
    ("rollout", "outcome", "form"),
    [
        (said("3+4=7"), 1.0, 1.0),
        (said("3+4=8"), 0.0, 1.0),
        (said(CALL, "7"), 1.0, 1.0),
        (said("<tool_call>{", "7"), 1.0, 0.0),  # right in the end, with a broken call on the way
        (said("7", truncated=True), 0.0, 0.0),
        (said("no idea"), 0.0, 0.0),
        (said(""), 0.0, 0.0),
        (said("7", row="c"), 0.0, 1.0),  # a code is not a number
        (said("007", row="c"), 1.0, 1.0),
        (said("7", row="g"), None, 0.0),  # A13: a gold that does not parse is not a wrong answer
    ],
)
def test_outcome_and_form(grader, rollout, outcome, form):
    scored = grader.grade(rollout)
    assert (scored.outcome, scored.components, scored.reward) == (outcome, {"format": form}, None)


def test_an_unknown_row_is_an_error(grader):
    with pytest.raises(KeyError, match="missing"):
        grader.grade(said("7", row="missing"))


def test_probes_cover_every_kind_in_use_and_pass(grader):
    probes = grader.probes()
    assert {p.probe_id.split("-")[0] for p in probes} == {"number", "code"}
    assert all(p.passed for p in probes)
    assert {p.expected for p in probes} >= {0.0, 1.0}  # right and wrong answers both


def test_weights_by_hand(grader):
    # Halfway of .1 → 0 the format part weighs .05: 2·1 + .05 right, .05 wrong but well formed.
    config = RewardConfig(outcome=2.0, format=Anneal(start=0.1, end=0.0, over_steps=10))
    scored = [grader.grade(r) for r in (said(CALL, "7"), said("8"), said("7", row="g"))]
    weighed = weigh(scored, config, step=5)
    assert [w.reward for w in weighed] == [pytest.approx(2.05), pytest.approx(0.05), None]
    assert weighed[0].turn_rewards == (0.0, pytest.approx(2.05))
    assert weighed[2].turn_rewards == (0.0,)
    assert [w.outcome for w in weighed] == [1.0, 0.0, None]
    assert [w.reward for w in weigh(scored, config, step=99)] == [2.0, 0.0, None]


def test_weighing_twice_is_weighing_once(grader):
    config = RewardConfig()
    scored = [grader.grade(said("7"))]
    once = weigh(scored, config, 3)
    assert weigh(once, config, 3) == once
    assert scored[0] == replace(scored[0], reward=None)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (10, 0.0), (11, -0.1), (15, -0.5), (20, -1.0), (500, -1.0)]
)
def test_the_overlong_penalty_by_hand(tokens, penalty):
    # Between 10 and 20 tokens it falls by a tenth a token: ((Lmax − Lc) − L) / Lc of DAPO.
    config = OverlongPenalty(expected_tokens=10, cutoff_tokens=20)
    assert overlong(tokens, config) == pytest.approx(penalty)


def test_an_overlong_answer_costs_its_factor_on_top_of_the_outcome():
    config = RewardConfig(
        format=Anneal(start=0.0, end=0.0),
        overlong=OverlongPenalty(expected_tokens=1, cutoff_tokens=3, factor=0.5),
    )
    grader = Grader({row.id: row for row in (ROW, CODE, BAD_GOLD)}, config)
    scored = [grader.grade(r) for r in (said("7"), said(CALL, "7"), said("7", row="g"))]
    assert [s.components["overlong"] for s in scored] == [0.0, -0.5, 0.0]  # 1, 2 and 1 tokens
    weighed = weigh(scored, config, 0)
    assert [w.reward for w in weighed] == [1.0, 0.75, None]
    assert weighed[1].turn_rewards == (0.0, 0.75)


def test_an_overlong_range_without_room_is_refused():
    with pytest.raises(ValueError, match=r"expected_tokens=20 is not below cutoff_tokens=20"):
        OverlongPenalty(expected_tokens=20, cutoff_tokens=20)
