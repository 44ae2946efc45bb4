r"""Exact rational value of a LaTeX or plain expression, bounded in size; no floats, no eval.

Handles `+ - * / ^ ! %`, brackets, `\frac`, `\sqrt` of perfect squares, mixed numbers and implicit
products. Whatever has a symbol or an irrational value is left to `tasks.rewards.symbolic`.
"""

import math
import re
from fractions import Fraction

MAX_BITS = 1 << 17
"""Bits of a numerator or denominator; 2006! needs 19,000 of them."""
MAX_DEPTH = 30
MAX_FACTORIAL = 10_000

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<name>\\[A-Za-z]+)|(?P<mark>\*\*|[-+*/^!%(){}\[\]]))"
)
_TIMES = {"*", "\\cdot", "\\times"}
_OVER = {"/", "\\div"}
_PAIRS = {"(": ")", "{": "}", "[": "]"}


class NotRationalError(ValueError):
    """The expression has a symbol, an irrational part or a syntax of its own."""


class TooLargeError(ArithmeticError):
    """The value is outside the bounds within which it can be held exactly."""


def exact_value(text: str) -> Fraction:
    """The value of `text`.

    Raises:
        NotRationalError: it is not an expression of rationals.
        TooLargeError: it is, and its value has more than `MAX_BITS` bits.
    """
    parser = _Parser(_tokens(text))
    value = parser.sum(0)
    if parser.peek() is not None:
        raise NotRationalError(f"unexpected {parser.peek()!r} in {text[:80]!r}")
    return value


def _tokens(text: str) -> list[str]:
    text = re.sub(r"\\frac\s*([0-9])\s*(?=[0-9{])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}", text)
    tokens, position = [], 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotRationalError(f"no rational expression: {text[:80]!r}")
        token = match[0].strip()
        tokens.append("^" if token == "**" else token)
        position = match.end()
    return tokens


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLargeError(f"more than {MAX_BITS} bits")
    return value


def _root(value: Fraction, degree: int) -> Fraction:
    if value < 0 or not 2 <= degree <= 64:
        raise NotRationalError("no rational root")
    roots = []
    for part in (value.numerator, value.denominator):
        guess = math.isqrt(part) if degree == 2 else _integer_root(part, degree)
        if guess**degree != part:
            raise NotRationalError("no rational root")
        roots.append(guess)
    return Fraction(*roots)


def _integer_root(value: int, degree: int) -> int:
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _power(_root(base, exponent.denominator), Fraction(exponent.numerator))
    times = exponent.numerator
    if base == 0 and times <= 0:
        raise NotRationalError("zero to a power below one")
    if abs(base) in (0, 1):
        return base if times % 2 else base * base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if max(bits, 1) * abs(times) > MAX_BITS:
        raise TooLargeError(f"more than {MAX_BITS} bits")
    return base**times


class _Parser:
    """Recursive descent over tokens; `depth` bounds the recursion."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def peek(self) -> str | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> str:
        token = self.peek()
        if token is None:
            raise NotRationalError("unfinished expression")
        self._next += 1
        return token

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise TooLargeError(f"nested more than {MAX_DEPTH} deep")
        value = self._product(depth)
        while self.peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = _bounded(value + sign * self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while True:
            token = self.peek()
            if token in _TIMES:
                self._take()
                value *= self._signed(depth)
            elif token in _OVER:
                self._take()
                divisor = self._signed(depth)
                if divisor == 0:
                    raise NotRationalError("division by zero")
                value /= divisor
            elif token is not None and (token in ("(", "{", "[") or token.startswith("\\")):
                value *= self._raised(depth)
            else:
                return value
            _bounded(value)

    def _signed(self, depth: int) -> Fraction:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        return sign * self._raised(depth)

    def _raised(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while self.peek() in ("!", "%"):
            value = self._factorial(value) if self._take() == "!" else value / 100
        if self.peek() == "^":
            self._take()
            if depth > MAX_DEPTH:
                raise TooLargeError(f"nested more than {MAX_DEPTH} deep")
            sign = -1 if self.peek() == "-" and self._take() else 1
            value = _power(value, sign * self._raised(depth + 1))
        return _bounded(value)

    @staticmethod
    def _factorial(value: Fraction) -> Fraction:
        if value.denominator != 1 or value < 0:
            raise NotRationalError("factorial of no natural number")
        if value > MAX_FACTORIAL:
            raise TooLargeError(f"factorial above {MAX_FACTORIAL}")
        return Fraction(math.factorial(value.numerator))

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            value = Fraction(token.replace(",", ""))
            mixed = token.isdecimal() and self.peek() == "\\frac"
            return value + self._atom(depth) if mixed else value
        if token in _PAIRS:
            value = self.sum(depth + 1)
            if self._take() != _PAIRS[token]:
                raise NotRationalError("brackets do not match")
            return value
        if token == "\\frac":
            top, bottom = self._argument(depth), self._argument(depth)
            if bottom == 0:
                raise NotRationalError("division by zero")
            return top / bottom
        if token == "\\sqrt":
            degree = self._argument(depth, "[") if self.peek() == "[" else Fraction(2)
            if degree.denominator != 1:
                raise NotRationalError("root of no whole degree")
            return _root(self._argument(depth), degree.numerator)
        raise NotRationalError(f"{token!r} is no rational")

    def _argument(self, depth: int, bracket: str = "{") -> Fraction:
        if self.peek() == bracket or (self.peek() or "").isdecimal():
            return self._atom(depth)
        raise NotRationalError("expected an argument in braces")
