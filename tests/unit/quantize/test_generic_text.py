"""Generic text: the same every time, cut into stretches of one length."""

import re

import pytest

from quantize import generic_text as module
from quantize.errors import GenericTextError
from quantize.generic_text import chunks, describe_text, generic_text


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_it_is_long_readable_and_the_same_each_time():
    text = generic_text()
    assert len(text) > 300_000 and text == generic_text()
    assert "<|" not in text  # no special token of any vocabulary here
    assert re.fullmatch(
        r"Python \d+\.\d+\.\d+ language reference, sha256 [0-9a-f]{12}", describe_text(text)
    )
    assert describe_text(text) != describe_text(text + " ")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, ["abc"]),
        (3, ["abc"]),
        (4, ["abc", "\n\nd"]),
        (99, ["abc", "\n\nd", "efg"]),  # all there is; the last two are no whole stretch
    ],
)
def test_stretches_hold_at_least_what_is_asked(tokens, expected):
    found = chunks(letters, "abc\n\ndefg", tokens, 3)
    assert ["".join(map(chr, stretch)) for stretch in found] == expected


def test_no_more_text_is_tokenised_than_is_needed():
    asked = []

    def encode(piece):
        asked.append(piece)
        return letters(piece)

    chunks(encode, "abcd\n\nefgh\n\nijkl", 4, 4)
    assert asked == ["abcd\n\n"]


def test_text_shorter_than_one_stretch_is_refused():
    with pytest.raises(GenericTextError, match="has 4 tokens, which is less than one stretch of 5"):
        chunks(letters, "ab", 1, 5)


def test_a_python_without_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(module, "MODULE", "no_such_module_anywhere")
    with pytest.raises(GenericTextError, match="imatrix_compare=false"):
        generic_text()
