r"""Exact numbers in text: literals become `Fraction`s, bounded in size.

A literal is an integer or decimal with optional sign, currency, thousands commas, exponent,
percent sign, or a fraction (`1/2`, `1 1/2`, `\frac{1}{2}`).
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from tasks.rewards.extraction import fold_symbols

MAX_DIGITS = 1000
"""Digits before or after the decimal point; larger values are outside what a gold may be."""

_CURRENCY = r"(?:(?:\\?\$|[€£¥₹]|USD\s|EUR\s)\s?(?P<sign_after>-)?)?"
_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\!)+[0-9]{3})+(?![0-9])|[0-9]+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_POWER_OF_TEN = (
    r"(?:[eE][+-]?[0-9]+(?![0-9A-Za-z])"
    r"|\s?(?:[x×*]|\\times|\\cdot)\s?10\s?\^\s?\{?[+-]?[0-9]+\}?)"
)
_TEX = r"\\[dt]?frac\s?(?:\{\s?-?[0-9]+\s?\}\s?\{\s?-?[0-9]+\s?\}|[0-9][0-9])"
_LITERAL = re.compile(
    rf"(?P<sign>-\s?)?{_CURRENCY}\s?"
    rf"(?:(?P<whole>[0-9]+(?:\s|(?=\\)))?(?:(?P<top>[0-9]+)\s?/\s?(?P<bottom>[0-9]+)|(?P<tex>{_TEX}))"
    rf"|(?P<plain>{_PLAIN})(?P<power>{_POWER_OF_TEN})?)"
    r"(?P<percent>\s?\\?%)?"
)
_JUNK = re.compile(
    r"(?<![0-9])[0-9][0-9,]*+(?:\.[0-9]++){2,}|(?<![0-9])[0-9]++(?:/[0-9]++){2,}"
    r"|(?<![0-9])[0-9]++:[0-9:]+|(?<![0-9])\.?[0-9][0-9.,]*+\s?\^\s?(?:\{[^}]*\}|-?[0-9.]+)"
    r"|[A-Za-z_][A-Za-z_0-9]*+(?:(?<=[0-9])(?:\.[0-9]++)+)?"
)
_SCIENTIFIC = re.compile(rf"{_PLAIN}{_POWER_OF_TEN}")
_SEPARATORS = re.compile(r"\{,\}|\\,|\\!|,")
_INTEGERS = re.compile(r"-?[0-9]+")


@dataclass(frozen=True)
class NumberLiteral:
    """One number as it stands in a text. `value` is None where it is too large to hold exactly."""

    text: str
    value: Fraction | None
    percent: bool = False
    start: int = 0
    end: int = 0


def _plain_value(plain: str, power: str | None) -> Fraction | None:
    digits = _SEPARATORS.sub("", plain)
    exponent = 0
    if power:
        found = _INTEGERS.findall(power.replace("+", ""))[-1]
        if len(found) > 9:
            return Fraction(0) if not digits.strip("0.") else None
        exponent = int(found)
    if len(digits) > 4 * MAX_DIGITS:
        return None
    number = Decimal(digits).as_tuple()
    assert isinstance(number.exponent, int)
    kept = "".join(map(str, number.digits)).lstrip("0")
    stripped = kept.rstrip("0")
    shift = number.exponent + exponent + len(kept) - len(stripped)
    if not stripped:
        return Fraction(0)
    if len(stripped) + max(shift, 0) > MAX_DIGITS or -shift > MAX_DIGITS:
        return None
    return Fraction(int(stripped)) * Fraction(10) ** shift


def _value(match: re.Match[str]) -> Fraction | None:
    if match["plain"]:
        value = _plain_value(match["plain"], match["power"])
    else:
        value = _fraction_value(match)
    if value is None:
        return None
    negative = bool(match["sign"]) != bool(match["sign_after"])
    value = -value if negative else value
    return value / 100 if match["percent"] else value


def _fraction_value(match: re.Match[str]) -> Fraction | None:
    if match["tex"]:
        parts = _INTEGERS.findall(match["tex"])
        top, bottom = parts if len(parts) == 2 else (parts[0][0], parts[0][1])
    else:
        top, bottom = match["top"], match["bottom"]
    whole = (match["whole"] or "0").strip()
    if max(len(whole), len(top), len(bottom)) > MAX_DIGITS or int(bottom) == 0:
        return None
    return int(whole) + Fraction(int(top), int(bottom))


def _sign_is_minus(text: str, start: int, sign: str) -> bool:
    """A dash is a sign unless an operand or a word stands before it: `34-37`, `34 - 37`."""
    before = text[:start].rstrip()
    if not before:
        return True
    touching = before == text[:start]
    if before[-1].isalnum() or before[-1] in ")}]%":
        return not touching and not sign.endswith((" ", "\t"))
    return True


def _literal(text: str, match: re.Match[str]) -> NumberLiteral:
    value = _value(match)
    start = match.start()
    if match["sign"] and not _sign_is_minus(text, start, match["sign"]):
        start += len(match["sign"])
        value = None if value is None else -value
    return NumberLiteral(
        text[start : match.end()].strip(), value, bool(match["percent"]), start, match.end()
    )


def find_numbers(text: str) -> list[NumberLiteral]:
    """Every number in `text`, left to right; dates, versions, powers and words are none."""
    folded = fold_symbols(text)
    numbers, position = [], 0
    literal, junk = _LITERAL.search(folded), _JUNK.search(folded)
    while literal is not None:
        if junk and junk.start() <= _first_digit(literal) and not _covers(folded, junk, literal):
            position = junk.end()
        else:
            numbers.append(_literal(folded, literal))
            position = literal.end()
        if literal.start() < position:
            literal = _LITERAL.search(folded, position)
        if junk and junk.start() < position:
            junk = _JUNK.search(folded, position)
    return numbers


def _first_digit(match: re.Match[str]) -> int:
    """Where the digits (or the `\\frac`) of a literal begin, past sign and currency."""
    starts = [match.start(name) for name in ("whole", "top", "tex", "plain")]
    return min(s for s in starts if s >= 0)


def _covers(text: str, junk: re.Match[str], literal: re.Match[str]) -> bool:
    r"""True where what looks like junk is a part of the literal (`5 x 10^3`, `\frac`)."""
    if _SCIENTIFIC.match(text, _first_digit(literal)) and literal["power"]:
        return junk.start() >= literal.start() and junk.end() <= literal.end()
    return bool(literal["tex"]) and junk.start() > literal.start()


def parse_number(text: str) -> NumberLiteral | None:
    """The number `text` is, None where it is not exactly one (`3 4`, `,`, `72 clips`, `nan`)."""
    trimmed = text.strip().strip("$").strip()
    if trimmed.endswith(".") and trimmed[:-1].strip():
        trimmed = trimmed[:-1]
    folded = fold_symbols(trimmed).strip()
    match = _LITERAL.fullmatch(folded)
    if match is None and folded.startswith("+"):
        match = _LITERAL.fullmatch(folded[1:])
    return None if match is None else _literal(match.string, match)
