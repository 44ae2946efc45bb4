"""The one verifier of the project: RL reward, evaluation and parity all grade with `verify`.

Kinds: `number` (exact rationals), `code` (character for character), `math` (LaTeX), `text` (words,
without regard to case, width and spacing).
"""

import re
import unicodedata

from tasks.rewards.extraction import (
    Extracted,
    anchored_answer,
    fold_symbols,
    trim_marks,
    visible_text,
)
from tasks.rewards.math_answers import same_answer, why_not_mathematical
from tasks.rewards.math_exact import TooLargeError
from tasks.rewards.math_syntax import MathSyntaxError, parse_shape
from tasks.rewards.number_literals import NumberLiteral, find_numbers, parse_number
from tasks.rewards.symbolic import SymbolicError
from tasks.rewards.verdict import Outcome, Verdict

ANSWER_KINDS = ("number", "code", "math", "text")
TAIL_CHARS = 4000
"""How much of the end of a reply is searched for an unmarked answer."""

_MATH_SPAN = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_AFTER_NUMBER = re.compile(r"\s*(?:[-+*/×÷=^]|\\(?:times|cdot|div)\b)")
_FAULTS = (ArithmeticError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)


class UnknownAnswerKindError(ValueError):
    """No verifier has this name."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    def __str__(self) -> str:
        return f"answer_kind={self.kind!r} unknown; choose from {', '.join(ANSWER_KINDS)}"


class _NoAnswer(Exception):
    """The reply states no answer; the text says why."""


def verify(
    answer_kind: str, gold: str, prediction_text: str, *, truncated: bool = False
) -> Verdict:
    """Grade one reply.

    Args:
        answer_kind: one of `ANSWER_KINDS`.
        gold: the reference answer, as it stands in the source.
        prediction_text: the last assistant message, thinking included.
        truncated: the reply ran into its token limit, so what it shows may be cut off (A16).

    Returns:
        The verdict. A gold that does not parse, or a fault in here, is UNSCORED with its reason
        (A12, A13); a reply with no answer is NO_ANSWER, apart from WRONG (A15).

    Raises:
        UnknownAnswerKindError: a mistake of the caller, not of the reply.
    """
    if answer_kind not in ANSWER_KINDS:
        raise UnknownAnswerKindError(answer_kind)
    extracted: str | None = None
    try:
        problem = gold_parses(answer_kind, gold)
        if problem is not None:
            return Verdict(Outcome.UNSCORED, reason=f"gold does not parse: {problem}")
        if truncated:
            raise _NoAnswer("cut off at the token limit")
        extracted = extract(answer_kind, prediction_text)
        equal = _EQUAL[answer_kind](gold, extracted)
    except _NoAnswer as nothing:
        return Verdict(Outcome.NO_ANSWER, reason=str(nothing))
    except SymbolicError as unknown:
        return Verdict(Outcome.UNSCORED, extracted, f"undecided: {unknown}")
    except TooLargeError as unknown:
        return Verdict(Outcome.UNSCORED, extracted, f"too large to decide: {unknown}")
    except _FAULTS as fault:
        return Verdict(Outcome.UNSCORED, extracted, f"{type(fault).__name__}: {fault}"[:300])
    return Verdict(Outcome.CORRECT if equal else Outcome.WRONG, extracted)


def gold_parses(answer_kind: str, gold: str | None) -> str | None:
    """Reason a gold answer cannot be graded against; None where it can (A13)."""
    if answer_kind not in ANSWER_KINDS:
        raise UnknownAnswerKindError(answer_kind)
    if not isinstance(gold, str):
        return f"not text: {gold!r}"
    if not gold.strip():
        return "empty"
    if answer_kind == "number":
        return _why_not_number(gold)
    if answer_kind == "math":
        return _why_not_math(gold)
    if answer_kind == "text" and not fold_text(gold):
        return "nothing but punctuation"
    return None


def _why_not_number(gold: str) -> str | None:
    literal = parse_number(gold)
    if literal is None:
        return f"not one number: {gold[:80]!r}"
    return None if literal.value is not None else f"no finite number in bounds: {gold[:40]!r}"


def _why_not_math(gold: str) -> str | None:
    try:
        return why_not_mathematical(gold)
    except (MathSyntaxError, TooLargeError, SymbolicError) as problem:
        return str(problem)


def extract(answer_kind: str, prediction_text: str) -> str:
    """The final answer a reply states, as text.

    Raises:
        _NoAnswer: it states none.
    """
    visible = _present(visible_text(prediction_text))
    anchored = anchored_answer(visible)
    if anchored is not None and not anchored.marked and answer_kind == "number":
        anchored = anchored if find_numbers(anchored.text or "") else None
    if anchored is not None:
        visible = _present(anchored)
    marked = anchored is not None and anchored.marked
    return _EXTRACT[answer_kind](visible, anchored is not None, marked)


def stated_answer(answer_kind: str, text: str) -> str | None:
    """The final answer in a text of the data itself (a worked solution); None without one."""
    try:
        return extract(answer_kind, text)
    except _NoAnswer:
        return None


def _present(extracted: Extracted) -> str:
    if extracted.text is None:
        raise _NoAnswer(extracted.reason)
    return extracted.text


def _extract_number(text: str, anchored: bool, marked: bool) -> str:
    """After the last `=` of the last line that has a number; else that line's last number.

    A marked answer must be one number: `\\boxed{4, 5}` would be right twice.
    """
    tail = fold_symbols(text[-TAIL_CHARS:])
    lines = [line for line in tail.splitlines() if re.search("[0-9=]", line)]
    if not lines:
        raise _NoAnswer("no number")
    line = lines[0] if anchored else lines[-1]
    if anchored and not marked:
        numbers = find_numbers(line)
        if numbers and numbers[0].start <= 2 and not _AFTER_NUMBER.match(line, numbers[0].end):
            return numbers[0].text
    _, equals, after = line.rpartition("=")
    numbers = find_numbers(after)
    if not numbers:
        raise _NoAnswer("no number after the last '='" if equals else "no number")
    if marked and len(numbers) > 1:
        raise _NoAnswer("several numbers where one is asked for")
    return numbers[0].text if equals else numbers[-1].text


def _extract_code(text: str, anchored: bool, marked: bool) -> str:
    """The last word of the last line, or the whole of what was marked."""
    lines = [line for line in text.splitlines() if _can_be_seen(line)]
    code = trim_marks(lines[-1]) if lines else ""
    if not anchored and " " in code and ":" in code:
        code = trim_marks(code.rpartition(":")[2])
    if not code:
        raise _NoAnswer("no code")
    return code


def _extract_math(text: str, anchored: bool, marked: bool) -> str:
    """What was marked, else the whole text, else its last `$…$`, else its last number."""
    if anchored and marked:
        return text
    spans = [next(filter(None, groups)) for groups in _MATH_SPAN.findall(text)]
    if anchored:
        return spans[0] if spans else text
    if spans:
        return spans[-1]
    if _reads_as_math(text):
        return text
    return _extract_number(text, False, False)


def _reads_as_math(text: str) -> bool:
    try:
        return why_not_mathematical(text) is None
    except TooLargeError:
        return True
    except MathSyntaxError:
        return False


def _extract_text(text: str, anchored: bool, marked: bool) -> str:
    """The last line, or the whole of what was marked."""
    lines = [line for line in text.splitlines() if fold_text(line) and _can_be_seen(line)]
    if not lines:
        raise _NoAnswer("no words")
    return lines[-1].strip()


def _can_be_seen(text: str) -> bool:
    """Whether there is anything but space and characters without a shape: those answer nothing."""
    return any(not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf") for c in text)


def fold_text(text: str) -> str:
    """NFKC, casefold, single spaces, no marks at the ends: how `text` answers are compared."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(" .,;:!?*_`\"'“”‘’()[]")


def _equal_number(gold: str, prediction: str) -> bool:
    left, right = parse_number(gold), parse_number(prediction)
    if left is None or right is None:
        raise ValueError(f"not one number: {prediction[:80]!r}")
    return _same_number(left, right)


def _same_number(gold: NumberLiteral, prediction: NumberLiteral) -> bool:
    """A value out of bounds differs from every gold, which is in bounds; percent may be a unit."""
    if gold.value is None or prediction.value is None:
        return False
    if gold.value == prediction.value:
        return True
    if gold.percent == prediction.percent:
        return False
    scale = 100 if prediction.percent else 1
    return gold.value * (100 if gold.percent else 1) == prediction.value * scale


def _equal_code(gold: str, prediction: str) -> bool:
    wanted = gold.strip()
    if prediction == wanted:
        return True
    return " " not in wanted and trim_marks(prediction.split()[-1]) == wanted


def _equal_math(gold: str, prediction: str) -> bool:
    try:
        shape = parse_shape(prediction)
    except MathSyntaxError as nothing:
        raise _NoAnswer(f"not mathematics: {nothing}") from nothing
    return same_answer(parse_shape(gold), shape)


def _equal_text(gold: str, prediction: str) -> bool:
    return fold_text(gold) == fold_text(prediction)


_EXTRACT = {
    "number": _extract_number,
    "code": _extract_code,
    "math": _extract_math,
    "text": _extract_text,
}
_EQUAL = {
    "number": _equal_number,
    "code": _equal_code,
    "math": _equal_math,
    "text": _equal_text,
}
