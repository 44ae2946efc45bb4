r"""Equality of mathematical answers by shape: exact rationals first, SymPy only for the rest.

Tolerances are never absolute: 2^{-99} and 2^{-98} differ (A11).
"""

import re

from tasks.rewards.math_exact import NotRationalError, exact_value
from tasks.rewards.math_syntax import (
    Collection,
    Ordered,
    Relation,
    Scalar,
    Shape,
    Words,
    parse_shape,
)
from tasks.rewards.symbolic import comparer

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_FUNCTIONS = frozenset(
    [
        *["sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh"],
        *["tanh", "log", "ln", "exp", "sqrt", "gcd", "lcm", "mod", "max", "min", "det", "dim"],
    ]
)


def why_not_mathematical(text: str) -> str | None:
    """Reason a text is no mathematical answer; None where it reads as one (A13)."""
    return _why_not(parse_shape(text))


def _why_not(shape: Shape) -> str | None:
    if isinstance(shape, Scalar):
        return _why_not_scalar(shape.text)
    if isinstance(shape, Words):
        return None if shape.text else "an empty text"
    items = (shape.left, shape.right) if isinstance(shape, Relation) else shape.items
    return next((reason for reason in map(_why_not, items) if reason), None)


def _why_not_scalar(text: str) -> str | None:
    try:
        exact_value(text)
    except NotRationalError:
        words = [w for w in _WORD.findall(text) if w not in _FUNCTIONS]
        if words:
            return f"words, not mathematics: {words[0]!r}"
        if re.fullmatch(r"[A-Za-z]|[-+]?\s*\\infty", text):
            return None
        return None if comparer().parses(text) else f"cannot be read: {text[:80]!r}"
    return None


def same_answer(gold: Shape, prediction: Shape) -> bool:
    """Whether two shapes state the same answer.

    Raises:
        SymbolicError: SymPy could not tell.
        TooLargeError: a value is outside the exact bounds.
    """
    gold, prediction = _without_name(gold, prediction), _without_name(prediction, gold)
    if isinstance(gold, Scalar) and isinstance(prediction, Scalar):
        return same_scalar(gold.text, prediction.text)
    if isinstance(gold, Words) or isinstance(prediction, Words):
        return _words(gold) == _words(prediction)
    if isinstance(gold, Collection) or isinstance(prediction, Collection):
        return _same_set(_as_items(gold), _as_items(prediction))
    if isinstance(gold, Ordered) and isinstance(prediction, Ordered):
        return (
            (gold.opening, gold.closing) == (prediction.opening, prediction.closing)
            and len(gold.items) == len(prediction.items)
            and all(map(same_answer, gold.items, prediction.items))
        )
    if isinstance(gold, Relation) and isinstance(prediction, Relation):
        return _same_relation(gold, prediction)
    return False


def _without_name(shape: Shape, other: Shape) -> Shape:
    """`x = 5` answers as 5 where the other side names no symbol."""
    if isinstance(shape, Relation) and shape.names_a_symbol and not isinstance(other, Relation):
        return shape.right
    return shape


def _words(shape: Shape) -> str | None:
    if isinstance(shape, Words):
        return shape.text
    if isinstance(shape, Scalar):
        return " ".join(shape.text.strip(" ().").casefold().split())
    return None


def _as_items(shape: Shape) -> tuple[Shape, ...]:
    return shape.items if isinstance(shape, Collection) else (shape,)


def _same_set(golds: tuple[Shape, ...], predictions: tuple[Shape, ...]) -> bool:
    return all(any(same_answer(g, p) for p in predictions) for g in golds) and all(
        any(same_answer(g, p) for g in golds) for p in predictions
    )


def _same_relation(gold: Relation, prediction: Relation) -> bool:
    if gold.operator != prediction.operator:
        return False
    named = gold.names_a_symbol and prediction.names_a_symbol
    if named and gold.left != prediction.left:
        return False
    scalars = [
        side.text
        for relation in (gold, prediction)
        for side in (relation.left, relation.right)
        if isinstance(side, Scalar)
    ]
    if gold.operator == "=" and not named and len(scalars) == 4:
        first, second = (f"({scalars[i]})-({scalars[i + 1]})" for i in (0, 2))
        return comparer().proportional(first, second)
    return same_answer(gold.left, prediction.left) and same_answer(gold.right, prediction.right)


def same_scalar(gold: str, prediction: str) -> bool:
    """Exact where both are rational; else text equality; else SymPy. Raises as `same_answer`."""
    if gold.replace(" ", "") == prediction.replace(" ", ""):
        return True
    values, rational = [], 0
    for text in (gold, prediction):
        try:
            values.append(exact_value(text))
            rational += 1
        except NotRationalError:
            continue
    if rational == 2:
        return _same_rational(gold, prediction, values[0] == values[1])
    if [w for w in _WORD.findall(prediction) if w not in _FUNCTIONS]:
        return False
    return comparer().equal(gold, prediction)


def _same_rational(gold: str, prediction: str, equal: bool) -> bool:
    """A percent sign on one side only may be a unit: 50 % answers 50 and 0.5."""
    if equal or ("%" in gold) == ("%" in prediction):
        return equal
    return exact_value(gold.replace("%", "")) == exact_value(prediction.replace("%", ""))
