"""Numbers in text, against values worked out by hand."""

from fractions import Fraction

import pytest

from tasks.rewards.number_literals import find_numbers, parse_number


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("$29.00.", [29]),
        ("1,234", [1234]),
        ("1,2345", [1, 2345]),
        ("3,4", [3, 4]),
        (r"1{,}000 and 1\,000", [1000, 1000]),
        ("34*7-52=186", [34, 7, 52, 186]),
        ("34 - 37", [34, 37]),
        ("= -3", [-3]),
        ("-$3 or $-3", [-3, -3]),
        ("\u2212 3", [-3]),
        ("1e5, 5 x 10^3", [100000, 5000]),
        ("5\u00bd", [Fraction(11, 2)]),
        (r"1\frac{1}{2}", [Fraction(3, 2)]),
        ("1 1/2", [Fraction(3, 2)]),
        (".5", [Fraction(1, 2)]),
        ("12/05/2024, 12:30, v1.2.3, 10^2, x1, A1B2", []),
        ("10%", [Fraction(1, 10)]),
        ("a-3", [3]),
        (",", []),
        ("", []),
    ],
)
def test_numbers_in_text(text, values):
    assert [number.value for number in find_numbers(text)] == values


@pytest.mark.parametrize("text", ["3 4", ",", "", "nan", "inf", "72 clips", "1.2.3", "--3", "1,23"])
def test_what_is_not_exactly_one_number(text):
    assert parse_number(text) is None


def test_size_is_bounded_on_both_sides():
    assert parse_number("1e1001").value is None
    assert parse_number("1e-1001").value is None
    assert parse_number("9" * 5000).value is None
    assert parse_number("1e999999999999999999").value is None
    assert parse_number("0e999999999999").value == 0
    assert parse_number("0" * 3000 + "7.0").value == 7


def test_division_by_zero_has_no_value():
    assert parse_number("1/0").value is None
