"""Text of the report: numbers for people, and untrusted text made visible.

A model's output is hostile until shown otherwise. Markup is escaped by the template engine; here
what could still mislead the eye (control characters, direction overrides, invisible and unpaired
characters) is replaced by a mark that can be read.
"""

import math
import unicodedata

UNKNOWN = "—"
_KEPT = "\n\t"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def visible(text: str) -> str:
    """`text` with every control, format, surrogate and private-use character shown as a mark."""
    return "".join(c if c in _KEPT or c.isprintable() else _mark(c) for c in text)


def _mark(char: str) -> str:
    if unicodedata.category(char) == "Zs":  # a space of another width is still a space
        return char
    return f"⟦U+{ord(char):04X}⟧"


def clipped(text: str, most: int) -> str:
    """At most `most` characters from both ends, and how many are left out between them."""
    if len(text) <= most:
        return text
    tail = most // 3
    head = most - tail
    return f"{text[:head]}\n… {len(text) - most:,} characters left out …\n{text[-tail:]}"


def clipped_line(text: str, most: int) -> str:
    """One line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def finite(value: object) -> float | None:
    """A finite number as float; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: object, digits: int = 3) -> str:
    """`digits` significant digits; powers of ten below 1e-4 and from 1e7 on."""
    known = finite(value)
    if known is None:
        return UNKNOWN
    if known == int(known) and abs(known) < 1e7:
        text = f"{int(known):,}"
    elif 1e-4 <= abs(known) < 1e7:
        text = f"{known:,.0f}" if abs(known) >= 10**digits else f"{known:.{digits}g}"
    else:
        mantissa, power = f"{known:.{digits - 1}e}".split("e")
        text = f"{float(mantissa):g}×10{str(int(power)).translate(_SUPERSCRIPTS)}"
    return text.replace("-", "−")


def percent(value: object, digits: int = 1) -> str:
    """A share as per cent."""
    known = finite(value)
    return UNKNOWN if known is None else f"{known * 100:.{digits}f} %"


def points(value: object, digits: int = 1) -> str:
    """A difference of shares in percentage points, with its sign."""
    known = finite(value)
    return UNKNOWN if known is None else f"{known * 100:+.{digits}f}".replace("-", "−")


def interval(pair: object, digits: int = 1) -> str:
    """`[low, high]` of a difference of shares, in percentage points."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return UNKNOWN
    return f"{points(pair[0], digits)} … {points(pair[1], digits)}"


def duration(seconds: object) -> str:
    """Seconds as `4.2 s`, `3 min 05 s` or `2 h 07 min`."""
    known = finite(seconds)
    if known is None:
        return UNKNOWN
    if known < 60:
        return f"{known:.1f} s"
    minutes, rest = divmod(round(known), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def size(count: object) -> str:
    """Bytes as KB, MB, GB (powers of 1000)."""
    known = finite(count)
    if known is None:
        return UNKNOWN
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(known) >= scale:
            return f"{known / scale:.3g} {unit}"
    return f"{known:.0f} bytes"


def dollars(value: object) -> str:
    """US dollars, with enough digits for small sums."""
    known = finite(value)
    if known is None:
        return UNKNOWN
    return f"${known:,.2f}" if abs(known) >= 1 or known == 0 else f"${number(known, 2)}"


def short_hash(value: object) -> str:
    """The first 12 characters of a hash."""
    return value[:12] if isinstance(value, str) and value else UNKNOWN
