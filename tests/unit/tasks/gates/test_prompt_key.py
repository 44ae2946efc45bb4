"""What counts as the same prompt."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.gates.prompt_key import prompt_key


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What is 2+2?", "  what\tIS\n2+2? "),
        ("\uff12+\uff12", "2+2"),
        ("Stra\u00dfe", "STRASSE"),
        ("caf\u00e9", "cafe\u0301"),
        ("a\u00a0b", "a b"),
        ("a\u200bb", "ab"),
        ("\ufb01ne", "fine"),
    ],
)
def test_same_prompt_in_another_dress(left, right):
    assert prompt_key(left) == prompt_key(right)


@pytest.mark.parametrize(("left", "right"), [("2+2", "2-2"), ("ab", "a b"), ("1", "10")])
def test_different_prompts(left, right):
    assert prompt_key(left) != prompt_key(right)


@settings(deadline=None)
@given(st.text())
def test_the_key_of_a_key_is_itself_and_case_and_form_do_not_matter(text):
    key = prompt_key(text)
    assert prompt_key(key) == key
    assert prompt_key(unicodedata.normalize("NFD", text)) == key
