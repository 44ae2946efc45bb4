"""Generated arithmetic: distinct, banded, exact, the same everywhere."""

import ast
import re
from collections import Counter

import pytest

from tasks.environments.calculator_problems import (
    BANDS,
    TooManyProblemsError,
    calculator_demonstrations,
    calculator_problems,
    problem,
)
from tasks.environments.calculator_tool import calc
from tasks.environments.toolcall import answer_tool_call
from tasks.rewards.verdict import Outcome
from tasks.rewards.verifiers import verify


def operations(expression):
    return sum(isinstance(node, ast.BinOp) for node in ast.walk(ast.parse(expression)))


def test_the_default_sizes_exist_distinct_and_in_equal_bands():
    train, heldout = calculator_problems(8192, 2048, seed=0)
    assert (len(train), len(heldout)) == (8192, 2048)
    assert len({row.prompt for row in train + heldout}) == 10240
    assert len({row.id for row in train + heldout}) == 10240
    for rows in (train, heldout):
        counts = Counter(row.band for row in rows)
        assert set(counts) == set(BANDS)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_bands_are_what_they_say():
    train, _ = calculator_problems(600, 3, seed=1)
    seen = {band: Counter() for band in BANDS}
    for row in train:
        text = row.meta["expression"]
        assert text[0].isdigit() and text[-1].isdigit()
        assert row.prompt in (text, f"{text}=?")
        seen[row.band][operations(text)] += 1
    assert set(seen["easy"]) == {1}
    assert set(seen["medium"]) == {2}
    assert set(seen["hard"]) == {2, 3}
    assert any("(" in row.prompt for row in train if row.band == "hard")


def test_one_problem_in_eight_is_asked_without_a_question_mark():
    train, _ = calculator_problems(2400, 3, seed=1)
    bare = sum(row.prompt == row.meta["expression"] for row in train)
    assert 240 <= bare <= 360  # 300 expected


def test_single_digits_stand_in_every_place():
    """An agent that saw only two-digit numbers copies `34*7-52` as `34*77-52`."""
    train, _ = calculator_problems(3000, 3, seed=2)
    medium = [re.split(r"[-+*]", r.meta["expression"]) for r in train if r.band == "medium"]
    for place in range(3):
        share = sum(len(numbers[place]) == 1 for numbers in medium) / len(medium)
        assert 0.2 < share < 0.4


def test_answers_are_exact_by_hand():
    assert problem("34*7-52", "medium").answer == "186"
    assert problem("34-37", "easy").answer == "-3"
    assert problem("10+(3-5)*2", "hard").answer == "6"


def test_the_same_seed_gives_the_same_rows_and_heldout_ignores_the_training_size():
    assert calculator_problems(90, 30, 5) == calculator_problems(90, 30, 5)
    assert calculator_problems(90, 30, 5)[1] == calculator_problems(900, 30, 5)[1]
    assert calculator_problems(90, 30, 5)[1] != calculator_problems(90, 30, 6)[1]


def test_more_problems_than_there_are_is_refused_by_name():
    with pytest.raises(TooManyProblemsError, match=r"data\.source\.train_rows=1000000"):
        calculator_problems(1_000_000, 32, 0)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_share_of_tool_demonstrations_is_kept(share):
    rows, _ = calculator_problems(30, 3, 0)
    shown = calculator_demonstrations(rows, 100, share, 0)
    assert sum(len(d.messages) == 4 for d in shown) == round(100 * share)
    assert len({d.id for d in shown}) == 100
    assert max(Counter(d.row_id for d in shown).values()) == 4  # 100 over 30 rows


def test_demonstrations_after_the_tool_teach_the_answer_and_not_the_call():
    rows, _ = calculator_problems(30, 3, 0)
    shown = calculator_demonstrations(rows, 100, 0.25, 0, answer_share=0.4)
    after = [d for d in shown if d.learn_from]
    assert len(after) == 40
    assert {d.messages[d.learn_from - 1]["role"] for d in after} == {"tool"}
    assert sum(len(d.messages) == 4 for d in shown if not d.learn_from) == 15  # 0.25 of 60


def test_demonstrations_are_what_the_tool_and_the_verifier_say():
    rows, _ = calculator_problems(60, 3, 0)
    answers = {row.id: row.answer for row in rows}
    for shown in calculator_demonstrations(rows, 120, 0.5, 0):
        last = shown.messages[-1]["content"]
        assert verify("number", answers[shown.row_id], last).outcome is Outcome.CORRECT
        if len(shown.messages) == 4:
            call, observed = shown.messages[1]["content"], shown.messages[2]["content"]
            assert answer_tool_call(call, {"calc": calc}) == observed
