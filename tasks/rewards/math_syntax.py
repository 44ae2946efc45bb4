r"""The shape of a mathematical answer: scalar, text, collection, tuple or interval, relation.

Only the shape is read here; scalars stay text and are compared by `math_exact` or `symbolic`.
"""

import re
from dataclasses import dataclass

from tasks.rewards.extraction import fold_symbols, last_box

MAX_CHARS = 400
MAX_ITEMS = 32

_DROP = re.compile(
    r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|quad|qquad|limits)(?![A-Za-z])"
    r"|\\[!;: ]|\\\$|~|(?:\^\s*\{?\s*\\circ\s*\}?)|°|(?<=[0-9])\s*\\,(?=\s|$)"
)
_RENAME = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\{,\}|(?<=[0-9])\\,(?=[0-9]{3})"), ","),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])|≤|<="), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])|≥|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|≠|!="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\%"), "%"),
    (re.compile("√"), r"\\sqrt "),
    (re.compile("π"), r"\\pi "),
    (re.compile("∞|(?<![A-Za-z\\\\])(?:infinity|inf|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile("×|·"), r"\\cdot "),
    (re.compile("÷"), "/"),
    (re.compile("±|\\+/-"), r"\\pm "),
    (re.compile("∪"), r"\\cup "),
    (re.compile(r"\\sqrt\s*([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:text|mathrm|textbf|mbox)\{\s*(?:and|or)\s*\}|\s(?:and|or)\s"), ","),
)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|mathbf|mbox)\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[0-9}%)])\s*\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?[0-9]\}?)?\s*$")
_RELATION = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])|[<>=]")
_OPENS, _CLOSES = "([{", ")]}"
_THOUSANDS = re.compile(r"[-+]?\s*[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?%?")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_SYMBOL = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w+\}?)?(?:\([A-Za-z, ]+\))?")


class MathSyntaxError(ValueError):
    """The text has no shape of a mathematical answer."""


@dataclass(frozen=True)
class Scalar:
    """One value or expression, as normalised LaTeX."""

    text: str


@dataclass(frozen=True)
class Words:
    r"""A verbal answer written as `\\text{…}`."""

    text: str


@dataclass(frozen=True)
class Collection:
    """Items in any order: a set, a list of solutions, a union."""

    items: tuple["Shape", ...]


@dataclass(frozen=True)
class Ordered:
    """Items in order between two marks: point, tuple, interval, matrix row."""

    opening: str
    closing: str
    items: tuple["Shape", ...]


@dataclass(frozen=True)
class Relation:
    """Two sides; `>` and `\\ge` are turned round to `<` and `\\le`."""

    operator: str
    left: "Shape"
    right: "Shape"

    @property
    def names_a_symbol(self) -> bool:
        """True for `x = …`, where the right side is the answer."""
        return self.operator == "=" and bool(
            isinstance(self.left, Scalar) and _SYMBOL.fullmatch(self.left.text)
        )


Shape = Scalar | Words | Collection | Ordered | Relation


def normalise(text: str) -> str:
    r"""LaTeX with one spelling for each construct; a box, `$…$`, units and full stop taken off."""
    text = fold_symbols(text).strip()
    box = last_box(text)
    if box is not None and box.text is not None:
        text = box.text
    text = re.sub(r"^(?:\$+|\\\(|\\\[)|(?:\$+|\\\)|\\\])$", "", text.strip()).strip()
    text = _DROP.sub("", text.replace("$", ""))
    for pattern, replacement in _RENAME:
        text = pattern.sub(replacement, text)
    text = _UNIT.sub("", text.strip())
    return text.strip().removesuffix(".").removesuffix(",").strip()


def parse_shape(text: str) -> Shape:
    """The shape of `text`.

    Raises:
        MathSyntaxError: empty, too long, too many items, or brackets that do not close.
    """
    text = normalise(text)
    if len(text) > MAX_CHARS:
        raise MathSyntaxError(f"longer than {MAX_CHARS} characters")
    if not text:
        raise MathSyntaxError("empty")
    return _shape(text, 0)


def _shape(text: str, depth: int) -> Shape:
    text = text.strip()
    if not text:
        raise MathSyntaxError("an empty item")
    if depth > 8:
        raise MathSyntaxError("nested too deep")
    for read in (_plus_minus, _union, _listed, _related, _enclosed, _worded):
        shape = read(text, depth)
        if shape is not None:
            return shape
    return Scalar(text)


def _plus_minus(text: str, depth: int) -> Shape | None:
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return None
    signs = []
    for plus, minus in (("+", "-"), ("-", "+")):
        one = re.sub(r"\\pm(?![A-Za-z])", plus, text)
        signs.append(_shape(re.sub(r"\\mp(?![A-Za-z])", minus, one), depth + 1))
    return Collection(tuple(signs))


def _union(text: str, depth: int) -> Shape | None:
    parts = _split(text, re.compile(r"\\cup(?![A-Za-z])"))
    return _collection(parts, depth) if len(parts) > 1 else None


def _listed(text: str, depth: int) -> Shape | None:
    """`2, 3` is a list; `n = 2, 3` is one relation, `x = 1, y = 2` a list of two."""
    if _THOUSANDS.fullmatch(text):
        return None
    parts = _split(text, re.compile(","))
    if len(parts) < 2:
        return None
    related = [bool(_split_relation(part)) for part in parts]
    if related[0] and not all(related):
        return None
    return _collection(parts, depth)


def _related(text: str, depth: int) -> Shape | None:
    found = _split_relation(text)
    if found is None:
        return None
    left, operator, right = found
    if not left.strip():  # `= 5`
        return _shape(right, depth + 1)
    sides = _shape(left, depth + 1), _shape(right, depth + 1)
    if operator in (">", "\\ge"):
        return Relation({">": "<", "\\ge": "\\le"}[operator], sides[1], sides[0])
    if operator == "=" and not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", left)):
        return sides[1]  # `34*7-52=186`: a calculation, whose result is the answer
    return sides[1] if operator == "\\in" else Relation(operator, *sides)


def _split_relation(text: str) -> tuple[str, str, str] | None:
    """Left of the last relation, or of the first where they are a chain of bounds."""
    places = [
        (m.start(), m.end(), m[0]) for m in _RELATION.finditer(text) if _level(text, m.start()) == 0
    ]
    if not places:
        return None
    start, end, operator = places[-1] if all(p[2] == "=" for p in places) else places[0]
    return text[:start], operator, text[end:]


def _enclosed(text: str, depth: int) -> Shape | None:
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = [Ordered("row", "row", _items(row.split("&"), depth)) for row in rows]
        return Ordered("matrix", "matrix", tuple(cells))
    if text.startswith("\\{") and text.endswith("\\}") and _closes_at_end(text, 2):
        inside = text[2:-2].strip()
        parts = _split(inside, re.compile(",")) if inside else []
        return _collection(parts, depth)
    if text[0] in "([" and text[-1] in ")]" and _closes_at_end(text, 1):
        parts = _split(text[1:-1], re.compile(","))
        if len(parts) > 1:
            return Ordered(text[0], text[-1], _items(parts, depth))
    return None


def _worded(text: str, depth: int) -> Shape | None:
    bare = _TEXT.sub(r"\1", text) if _TEXT.fullmatch(text) else None
    return Words(" ".join(bare.strip(" ().").casefold().split())) if bare is not None else None


def _items(parts: list[str], depth: int) -> tuple[Shape, ...]:
    if len(parts) > MAX_ITEMS:
        raise MathSyntaxError(f"more than {MAX_ITEMS} items")
    return tuple(_shape(part, depth + 1) for part in parts)


def _collection(parts: list[str], depth: int) -> Collection:
    items: list[Shape] = []
    for item in _items(parts, depth):
        items.extend(item.items if isinstance(item, Collection) else (item,))
    return Collection(tuple(items))


def _level(text: str, position: int) -> int:
    before = text[:position]
    return sum(before.count(mark) for mark in _OPENS) - sum(before.count(m) for m in _CLOSES)


def _closes_at_end(text: str, mark_chars: int) -> bool:
    """True where the first bracket is closed by the last one (any kind: `(0,1]`)."""
    level = 0
    for position, char in enumerate(text):
        level += (char in _OPENS) - (char in _CLOSES)
        if level == 0 and position >= mark_chars:
            return position == len(text) - 1
    return False


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at separators outside every bracket."""
    parts, start = [], 0
    for match in separator.finditer(text):
        if _level(text, match.start()) == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    if _level(text, len(text)) != 0:
        raise MathSyntaxError("brackets do not match")
    return parts
