"""Child process that compares expressions with SymPy; `tasks.rewards.symbolic` talks to it.

One JSON request a line on stdin, one JSON reply a line on stdout; ends with its stdin. It has no
time limit of its own: the parent ends it at the deadline, which works off the main thread (A12).
LaTeX is read by a grammar; nothing is evaluated as code.
"""

import json
import resource
import sys
from typing import Any

MEMORY_BYTES = 4 << 30
DIGITS = 1000
"""Working digits: a difference that stays nought to so many is nought."""


class UnreadableExpressionError(ValueError):
    """The grammar does not take the expression."""


def read_expression(text: str) -> Any:
    """SymPy expression of LaTeX; declared decimals become exact rationals."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    try:
        value = latex2sympy(text)
    except Exception as error:
        if type(error) is Exception:  # the grammar's own way to say "syntax error"
            raise UnreadableExpressionError(f"{text[:80]!r}: {error}") from error
        raise
    if not isinstance(value, sympy.Basic):
        raise UnreadableExpressionError(f"no expression: {text[:80]!r}")
    exact = {f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float)}
    return value.xreplace(exact)


def equal(left: Any, right: Any) -> bool:
    """Same value: structurally, by simplification where there are symbols, else numerically."""
    import sympy

    if left == right:
        return True
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    if left.free_symbols or right.free_symbols:
        return bool(sympy.simplify(left - right) == 0)
    if not (left.is_finite and right.is_finite):
        return False
    return all(_is_nought(part) for part in (left - right).as_real_imag())


def _is_nought(value: Any) -> bool:
    """Whether a constant is 0: its digits are sought until some are certain or `DIGITS` are used.

    So there is no tolerance beside which a tiny difference would vanish.
    """
    from sympy.core.evalf import PrecisionExhausted

    if value == 0:
        return True
    try:
        return bool(value.evalf(5, maxn=DIGITS, strict=True) == 0)
    except PrecisionExhausted:
        return True


def proportional(left: Any, right: Any) -> bool:
    """Two equations `left = 0` and `right = 0` with the same solutions: one a multiple of other."""
    import sympy

    ratio = sympy.simplify(left / right)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def answer(request: dict[str, str]) -> dict[str, Any]:
    """Reply to one request: `{"parses"}` or `{"equal"}`, or `{"error"}`."""
    try:
        expressions = [read_expression(request[k]) for k in ("left", "right") if k in request]
        if request["ask"] == "parses":
            return {"parses": True}
        compare = equal if request["ask"] == "equal" else proportional
        return {"equal": compare(*expressions)}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    except (MemoryError, NotImplementedError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    """Serve until stdin closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries must not write between replies
    read_expression("x+1")
    replies.write('{"ready": true}\n')
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
