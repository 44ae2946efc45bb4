"""Numbers for people, hostile text made visible."""

import math

import pytest

from flows.report import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (0.12345, "0.123"),
        (-0.5, "−0.5"),
        (1234.5, "1,234"),
        (2.04e-7, "2.04×10⁻⁷"),
        (3e9, "3×10⁹"),
        (None, "—"),
        (math.nan, "—"),
        (math.inf, "—"),
        (True, "—"),
        ("7", "—"),
    ],
)
def test_number(value, shown):
    assert text.number(value) == shown


def test_shares_points_and_intervals():
    assert text.percent(0.1234) == "12.3 %"
    assert text.points(-0.0123) == "−1.2"
    assert text.interval([0.01, 0.2]) == "+1.0 … +20.0"
    assert text.interval([0.01]) == "—"
    assert text.percent(None) == text.points("x") == text.interval(None) == "—"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (59.94, "59.9 s"), (65, "1 min 05 s"), (7620, "2 h 07 min"), (None, "—")],
)
def test_duration(seconds, shown):
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(12, "12 bytes"), (890_000, "890 KB"), (2_520_000, "2.52 MB"), (None, "—")]
)
def test_size(count, shown):
    assert text.size(count) == shown


@pytest.mark.parametrize(
    ("usd", "shown"),
    [(12.5, "$12.50"), (0, "$0.00"), (0.0071, "$0.0071"), (1.16e-6, "$1.2×10⁻⁶"), (None, "—")],
)
def test_dollars(usd, shown):
    assert text.dollars(usd) == shown


@pytest.mark.parametrize(
    ("char", "mark"),
    [
        ("\x00", "⟦U+0000⟧"),
        ("\x1b", "⟦U+001B⟧"),
        ("\r", "⟦U+000D⟧"),
        ("\x7f", "⟦U+007F⟧"),
        ("\x85", "⟦U+0085⟧"),
        ("\u200b", "⟦U+200B⟧"),
        ("\u202e", "⟦U+202E⟧"),
        ("\u2066", "⟦U+2066⟧"),
        ("\u2028", "⟦U+2028⟧"),
        ("\ufeff", "⟦U+FEFF⟧"),
        ("\ud800", "⟦U+D800⟧"),
        ("\U000e0041", "⟦U+E0041⟧"),
    ],
)
def test_what_does_not_print_is_a_mark(char, mark):
    assert text.visible(f"a{char}b") == f"a{mark}b"
    text.visible(char).encode("utf-8")


def test_ordinary_text_stays():
    ordinary = "Zoë\tsagt: «日本語» 🙂\n\u00a0x = ½ עברית"
    assert text.visible(ordinary) == ordinary


def test_clipped_keeps_both_ends_and_counts_the_rest():
    assert text.clipped("abc", 3) == "abc"
    assert (
        text.clipped("a" * 60 + "b" * 40, 30)
        == "a" * 20 + "\n… 70 characters left out …\n" + "b" * 10
    )
    assert text.clipped_line("a  b\nc", 10) == "a b c"
    assert text.clipped_line("abcdef", 4) == "abc…"
