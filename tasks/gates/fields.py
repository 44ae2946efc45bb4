"""Tells apart the ways in which a text field can be missing (A23)."""

import math
from enum import Enum

from tasks.gates.prompt_key import prompt_key

_STRINGIFIED = frozenset(["nan", "NaN", "None", "<NA>", "NaT"])


class FieldState(str, Enum):
    """What a text field holds."""

    TEXT = "text"
    NONE = "none"
    NAN = "nan"
    """A float that is not a number, as frames have for missing values."""
    EMPTY = "empty"
    """Nothing but blanks and invisible characters."""
    NAN_WORD = "nan_word"
    """The word a missing value becomes when a frame is turned to strings."""
    NOT_TEXT = "not_text"

    @property
    def advice(self) -> str:
        """One line for the quarantine file."""
        return _ADVICE[self]


_ADVICE = {
    FieldState.TEXT: "text",
    FieldState.NONE: "missing (null)",
    FieldState.NAN: "missing (a float NaN)",
    FieldState.EMPTY: "empty or blank",
    FieldState.NAN_WORD: "the word of a missing value that was turned to text",
    FieldState.NOT_TEXT: "no text; expected a string",
}


def field_state(value: object) -> FieldState:
    """State of one field."""
    if value is None:
        return FieldState.NONE
    if isinstance(value, float) and math.isnan(value):
        return FieldState.NAN
    if not isinstance(value, str):
        return FieldState.NOT_TEXT
    if not prompt_key(value):
        return FieldState.EMPTY
    return FieldState.NAN_WORD if value.strip() in _STRINGIFIED else FieldState.TEXT
