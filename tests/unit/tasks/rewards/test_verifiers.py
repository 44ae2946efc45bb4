"""The one verifier, against pairs whose verdict is known."""

import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rewards import verifiers
from tasks.rewards.probes import known_answer_probes
from tasks.rewards.verdict import Outcome
from tasks.rewards.verifiers import (
    ANSWER_KINDS,
    UnknownAnswerKindError,
    gold_parses,
    verify,
)

C, W, N, U = Outcome.CORRECT, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNSCORED

A11 = [
    ("1000", "1,000", C),
    ("1000", r"\boxed{1{,}000}", C),
    (r"\frac{1}{2}", "0.5", C),
    (r"\frac{1}{2}", r"\boxed{0.5}", C),
    (r"50\%", "0.5", C),
    ("-3", "3", W),
    ("-3", "#### -3", C),
    ("033", "33", C),
    ("29", "29.00", C),
    (r"\sqrt{8}", r"2\sqrt{2}", C),
    (r"1\frac{1}{2}", "1.5", C),
    (r"\frac{7}{3}", "2.33", W),
    ("(1,2)", "(2,1)", W),
    (r"\{1,2\}", r"\{2,1\}", C),
    ("(0,1]", "[0,1]", W),
    (r"\pm 2021", "2021", W),
    ("n=2, 3, 4", "n=1, 2, 3", W),
    ("D = (0, 1)", "D = (0, 1.5)", W),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", W),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}", W),
    ("5", r"\boxed{4} wait, actually \boxed{5}", C),
    ("4", r"\boxed{4} wait, actually \boxed{5}", W),
    ("7", r"<think>maybe \boxed{7}</think> The answer is \boxed{8}", W),
    ("2", "", N),
    ("2", r"\boxed{}", N),
    ("840", r"\boxed{840} and so \boxed{840}", C),
    ("4", r"\boxed{004} and so \boxed{004}", C),
    ("73", "Final Answer: **73**", C),
]

A11_NEIGHBOURS = [
    (r"\frac{1}{2^{99}}", r"\frac{2}{2^{100}}", C),
    (r"\frac{\sqrt{2}}{2^{99}}", r"\frac{\sqrt{2}}{2^{98}}", W),
    ("10^{-50}", "0", W),
    ("e^{-200}", "e^{-201}", W),
    ("1+10^{-60}", "1", W),
    (r"\sqrt{2}+10^{-60}", r"\sqrt{2}", W),
    (r"\pi", "3.14159", W),
    (r"\pm 2021", r"2021, -2021", C),
    (r"\pm 2021", r"\pm 2022", W),
    ("[0,1]", r"\left[0, 1\right]", C),
    ("(0,1)", "[0,1]", W),
    ("x=5", "5", C),
    ("5", "x = 5", C),
    ("x=5", "y=5", W),
    ("2x+3y=6", "4x+6y=12", C),
    ("2x+3y=6", "4x+6y=13", W),
    ("x^2+2x+1", "(x+1)^2", C),
    ("x>5", "5<x", C),
    ("x>5", r"x\ge 5", W),
    (r"2\pm\sqrt{3}", r"2+\sqrt{3}, 2-\sqrt{3}", C),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)", C),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", W),
    (r"\text{Evelyn}", r"\boxed{\text{evelyn}}", C),
    (r"5 \text{ cm}", "5", C),
    (r"90^\circ", "90", C),
    (r"\frac12", r"\dfrac{1}{2}", C),
    ("3", r"\log_2 8", C),
    (r"\{1,2\}", r"\{1,2,3\}", W),
    ("186", "34*7-52=186", C),
    ("4", r"4\sqrt{2}", W),
    (r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}+10^{-60}", W),
    (r"50\%", "50", C),
    ("50", r"50\%", C),
    ("50", "0.5", W),
]


@pytest.mark.parametrize(("gold", "prediction", "right"), A11)
def test_a11_answer_pairs(gold, prediction, right):
    assert verify("math", gold, prediction).outcome is right


@pytest.mark.parametrize(("gold", "prediction", "right"), A11_NEIGHBOURS)
def test_a11_neighbours_of_the_table(gold, prediction, right):
    assert verify("math", gold, prediction).outcome is right


A11_NUMBERS = [row for row in A11 if gold_parses("number", row[0]) is None]


@pytest.mark.parametrize(("gold", "prediction", "right"), A11_NUMBERS)
def test_a11_numeric_rows_hold_for_plain_numbers_too(gold, prediction, right):
    expected = {(r"\frac{7}{3}", "2.33"): W}.get((gold, prediction), right)
    assert verify("number", gold, prediction).outcome is expected


def test_a11_numeric_rows_are_not_an_empty_set():
    assert len(A11_NUMBERS) >= 15


def _half(_: int) -> tuple[float | None, float | None]:
    """Score of an exact, and of a symbolic, known answer; at top level so a process can run it."""
    return (
        verify("math", r"\frac{1}{2}", r"\boxed{0.5}").score,
        verify("math", r"\sqrt{8}", r"\boxed{2\sqrt{2}}").score,
    )


def test_a12_scores_the_same_on_main_thread_worker_thread_and_process_pool():
    assert threading.current_thread() is threading.main_thread()
    on_main = _half(0)
    with ThreadPoolExecutor(2) as threads:
        in_threads = list(threads.map(_half, range(4)))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        in_process = processes.submit(_half, 0).result()
    assert [on_main, *in_threads, in_process] == [(1.0, 1.0)] * 6


def test_a12_a_fault_in_the_verifier_is_unscored_with_its_reason(monkeypatch):
    def broken(gold, prediction):
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(verifiers._EQUAL, "number", broken)
    verdict = verify("number", "5", "5")
    assert (verdict.outcome, verdict.score) == (U, None)
    assert "ZeroDivisionError: planted" in verdict.reason


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_a12_known_answers_hold_and_tell_a_broken_verifier(kind):
    probes = known_answer_probes(kind)
    assert [verify(kind, gold, said).outcome for gold, said, _ in probes] == [p[2] for p in probes]
    assert {C, W, N, U} == {right for _, _, right in probes}


@pytest.mark.parametrize(
    ("kind", "gold"),
    [
        ("math", "Anya must climb one floor while Vanya climbs five"),
        ("number", "Anya must climb one floor while Vanya climbs five"),
        ("math", "banana"),
        ("math", r"\frac{1"),
        ("math", r"9^{9^{9^9}}"),
        ("number", "3 4"),
        ("number", "nan"),
        ("number", "inf"),
        ("number", "1/0"),
        ("number", "72 clips"),
        ("number", ","),
        ("number", "1e999999"),
        ("text", "..."),
        ("code", " "),
        ("number", ""),
        ("number", None),
    ],
)
def test_a13_gold_that_does_not_parse_is_unscored_whatever_is_said(kind, gold):
    assert gold_parses(kind, gold)
    for said in ("banana", "7", str(gold)):
        verdict = verify(kind, gold, said)
        assert (verdict.outcome, verdict.score) == (U, None)
        assert verdict.reason.startswith("gold does not parse: ")


def test_a13_a_plain_digit_parses_as_mathematics():
    assert gold_parses("math", "6") is None
    assert verify("math", "6", r"\boxed{7}").outcome is W
    assert verify("math", "6", r"\boxed{6}").outcome is C


@pytest.mark.parametrize(
    ("gold", "said", "right"),
    [
        ("29", "the total cost is $29.00.", C),
        ("72", "72 clips, altogether.", C),
        ("1234", "1,234", C),
        ("-3", "-3", C),
        ("-3", "3", W),
        ("3", "-3", W),
        ("34", "3 4", W),
        ("4", "3 4", C),
        ("0", ",", N),
        ("5", "altogether.", N),
        ("186", "186", C),
        ("186", "34*7-52=186", C),
        ("-3", "34-37=-3", C),
        ("37", "34-37", C),
        ("-37", "34-37", W),
        ("52", "34*7-52=", N),
        ("186", "34*7-52=186, in 2 steps", C),
        ("186", "The answer is 186 because 34*7=238", C),
        ("8", "the answer is 5 + 3 = 8.", C),
        ("42", "The answer is as follows:\n42", C),
        ("5", r"\boxed{4, 5}", N),
        ("1000", "#### 1,000", C),
        ("50", "50%", C),
        ("-3", "\u22123", C),
        ("7", "\uff17", C),
        ("186", "186<|im_end|>", C),
        ("100", "10\u00b2", N),
        ("102", "10\u00b2", N),
    ],
)
def test_a15_number_at_the_end_of_a_reply(gold, said, right):
    assert verify("number", gold, said).outcome is right


def test_a15_what_was_extracted_is_reported():
    assert verify("number", "29", "the total cost is $29.00.").extracted == "$29.00"
    assert verify("number", "5", "altogether.").reason == "no number"


def test_a15_an_unfinished_tool_call_is_no_answer():
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "34*7-52"}}'
    assert verify("number", "52", call).outcome is N
    assert verify("number", "52", call + "</tool_call>").outcome is N


@pytest.mark.parametrize("kind", ["number", "math", "code", "text"])
def test_a16_thinking_that_was_not_closed_is_no_answer(kind):
    verdict = verify(kind, "7", "<think>so far 3+4=7")
    assert (verdict.outcome, verdict.score, verdict.extracted) == (N, 0.0, None)


@pytest.mark.parametrize(
    "said",
    [
        r"<think>so \boxed{7}</think>",
        r"<think>so \boxed{7}",
        "7 <think>or perhaps",
        "<THINK>7",
        "<think>a<think>b</think>7</think>",
        "7</think>",
        "7 <think>a</think></think>",
        "<thinking>7",
    ],
)
def test_a16_nothing_said_after_thinking_is_no_answer(said):
    assert verify("number", "7", said).outcome is N
    assert verify("math", "7", said).outcome is N


def test_a16_a_reply_cut_at_the_limit_is_no_answer():
    verdict = verify("number", "7", "3+4=7", truncated=True)
    assert (verdict.outcome, verdict.reason) == (N, "cut off at the token limit")
    assert verify("number", "7", "3+4=7", truncated=False).outcome is C


def test_a16_an_answer_after_thinking_counts_also_where_the_prompt_opened_it():
    assert verify("number", "8", "<think>7</think>8").outcome is C
    assert verify("number", "8", "7 or so</think>8").outcome is C


def test_a09_leading_zeros_matter_for_codes_and_not_for_numbers():
    assert verify("number", "033", "33").outcome is C
    assert verify("code", "033", "33").outcome is W
    assert verify("code", "033", "The code is: `033`.").outcome is C
    assert verify("code", "1e5", "100000").outcome is W


def test_text_answers_ignore_case_width_and_spacing():
    assert verify("text", "New York", "The answer is  new\u00a0ＹＯＲＫ.").outcome is C
    assert verify("text", "New York", "York").outcome is W


def test_a_value_too_large_to_hold_is_unscored_in_mathematics_and_wrong_as_a_number():
    assert verify("math", "5", r"\boxed{9^{9^{9^9}}}").outcome is U
    assert verify("number", "5", "1e999999999999").outcome is W


def test_an_unknown_kind_is_the_callers_mistake():
    with pytest.raises(UnknownAnswerKindError, match="choose from number, code, math, text"):
        verify("float", "5", "5")


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30))
def test_every_integer_is_found_in_every_dress(value):
    for said in (f"{value}", f"1*1={value}", f"It is {value:,}.", f"#### {value}", f"{value}.00"):
        assert verify("number", str(value), said).outcome is C
        assert verify("number", str(value + 1), said).outcome is W


@settings(deadline=None)
@given(st.fractions(max_denominator=10**6))
def test_every_fraction_equals_itself_and_no_neighbour(value):
    gold = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert verify("math", gold, rf"\boxed{{{value.numerator}/{value.denominator}}}").outcome is C
    assert verify("math", gold, rf"\boxed{{{gold} + 10^{{-40}}}}").outcome is W


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200), st.sampled_from(["number", "code", "text"]))
def test_no_reply_makes_the_verifier_raise_or_go_unscored(said, kind):
    verdict = verify(kind, "7", said)
    assert verdict.outcome is not U
    assert (verdict.extracted is None) == (verdict.outcome is N)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=r"0123456789\{}()[],.=+-*/^!% fracsqtboxed$", max_size=60))
def test_no_latex_makes_the_verifier_raise(said):
    assert verify("math", "7", said).outcome in set(Outcome)


@pytest.mark.parametrize(
    "said",
    [
        "9 " * 100_000,
        "9" * 200_000,
        "<think>" * 50_000,
        r"\boxed{" * 50_000,
        r"\boxed{" + "(" * 300 + "1" + ")" * 300 + "}",
        r"\boxed{" + "-" * 390 + "1}",
        "answer is " * 20_000,
        "1,1" * 50_000,
        "<tool_call>" * 20_000,
    ],
)
@pytest.mark.timeout(20)
def test_a_monstrous_reply_is_graded_in_bounded_time(said):
    for kind in ("number", "math"):
        assert verify(kind, "7", said).outcome in (W, N, U)


@pytest.mark.parametrize("kind", ["code", "text", "number", "math"])
@pytest.mark.parametrize("nothing", ["\u200b", "\u200b\n\u2060", "\ufeff ", "\x00\x07"])
def test_a_reply_nobody_can_see_is_no_answer(kind, nothing):
    assert verify(kind, "7", nothing).outcome is N
    if kind in ("code", "text"):
        assert verify(kind, "7", f"7\n{nothing}").outcome is C
