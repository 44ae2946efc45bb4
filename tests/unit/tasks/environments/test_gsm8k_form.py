"""The `####` form of answers."""

import pytest

from tasks.environments import gsm8k

TWO = "48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72 altogether.\n#### 72"


def test_final_answer_solution_and_steps():
    assert gsm8k.final_answer(TWO) == "72"
    assert gsm8k.clean_solution(TWO) == "48/2 = 24 clips.\n48+24 = 72 altogether.\n#### 72"
    assert gsm8k.steps(TWO) == 2


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("#### 1,000", "1,000"),
        ("x\n#### -3 \n", "-3"),
        ("####", None),
        ("no mark", None),
        ("", None),
    ],
)
def test_final_answers(answer, final):
    assert gsm8k.final_answer(answer) == final


@pytest.mark.parametrize(
    ("count", "band"), [(1, "easy"), (2, "easy"), (3, "medium"), (4, "medium"), (5, "hard")]
)
def test_bands_count_annotations_or_lines(count, band):
    assert gsm8k.band("a <<1+1=2>>2\n" * count + "#### 2") == band
    assert gsm8k.band("a line\n" * count + "#### 2") == band
