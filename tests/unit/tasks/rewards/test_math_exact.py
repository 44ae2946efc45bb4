"""Exact values worked out by hand."""

import math
from fractions import Fraction

import pytest

from tasks.rewards.math_exact import NotRationalError, TooLargeError, exact_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^{10}", 1024),
        ("2^10", 1024),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^{3^2}", 512),
        ("2^{-2}", Fraction(1, 4)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{1}2", Fraction(1, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"2(3+4)", 14),
        (r"34\cdot 7-52", 186),
        ("6/2/3", 1),
        ("10-3-2", 5),
        ("5!", 120),
        ("50%", Fraction(1, 2)),
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        (r"\sqrt[3]{27}", 3),
        (r"8^{\frac{2}{3}}", 4),
        ("1,234.5", Fraction(2469, 2)),
        ("0^5", 0),
        ("(-1)^{999999999}", -1),
        ("25!", math.factorial(25)),
    ],
)
def test_exact_values(text, value):
    assert exact_value(text) == value


def test_a_large_factorial_is_exact():
    assert exact_value("2004!") == math.factorial(2004)
    assert exact_value(r"\frac{2006!}{2004!}") == 2006 * 2005


@pytest.mark.parametrize(
    "text",
    ["x", r"\pi", r"\sqrt{2}", "1/0", r"\frac{1}{0}", "0^0", "0^{-1}", "(1", "1)", "", "3 4", "1+"],
)
def test_what_is_no_rational(text):
    with pytest.raises(NotRationalError):
        exact_value(text)


@pytest.mark.parametrize("text", ["2^{999999}", "9^{9^{9^9}}", "99999!", "(" * 50 + "1" + ")" * 50])
def test_what_is_too_large(text):
    with pytest.raises(TooLargeError):
        exact_value(text)
