"""Takes the final answer out of a reply: away from thinking and tool calls, marked or last."""

import re
import unicodedata
from dataclasses import dataclass

_THINK = re.compile(r"<(/?)(?:think(?:ing)?|thought)>", re.IGNORECASE)
_TOOL = re.compile(r"<(/?)tool_call>")
_SPECIAL = re.compile(r"<\|[A-Za-z0-9_]+\|>")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_SAYS = re.compile(r"\banswer\b[\s*_]*(?:is\b|[:=])[\s:=*_]*([^\n]*)", re.IGNORECASE)
_DASHES = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2044": "/"})
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")


@dataclass(frozen=True)
class Extracted:
    """A piece of a reply that states the answer; `text` is None where there is none."""

    text: str | None
    marked: bool = False
    """True where it stands in a box or after `####`, so that it must be the answer alone."""
    reason: str = ""


def fold_symbols(text: str) -> str:
    """NFKC, with superscripts and vulgar fractions kept apart from the digits before them.

    Plain NFKC reads 10² as 102 and 5½ as 51/2.
    """
    text = _SUPERSCRIPT.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = _VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]), text)
    return unicodedata.normalize("NFKC", text).translate(_DASHES)


def visible_text(text: str) -> Extracted:
    """The reply without thinking and tool calls; no text where either was left open (A16)."""
    spoken = _outside(text, _THINK, headless=True)
    if spoken is None:
        return Extracted(None, reason="thinking was not closed")
    spoken = _outside(spoken, _TOOL, headless=False)
    if spoken is None:
        return Extracted(None, reason="tool call was not closed")
    spoken = _SPECIAL.sub("", spoken).strip()
    return Extracted(spoken) if spoken else Extracted(None, reason="nothing was said")


def _outside(text: str, mark: re.Pattern[str], *, headless: bool) -> str | None:
    """What stands outside marked blocks, in one pass; None where a block is left open.

    `headless`: a closing mark without an opening one ends a block that began in the prompt.
    """
    kept: list[str] = []
    start, is_open = 0, False
    for found in mark.finditer(text):
        closing = found[1] == "/"
        if closing and not is_open and headless:
            kept.clear()
        elif not closing and not is_open:
            kept.append(text[start : found.start()])
        is_open = not closing
        start = found.end()
    return None if is_open else "".join([*kept, text[start:]])


def last_box(text: str) -> Extracted | None:
    r"""Content of the last `\boxed{…}`; None where there is no box at all (A11).

    A last box left open or empty is no answer, even after an earlier full one.
    """
    opens = list(_BOX.finditer(text))
    if not opens:
        return None
    start = opens[-1].end()
    depth = 1
    for position in range(start, len(text)):
        escaped = text[position - 1] == "\\"
        if text[position] == "{" and not escaped:
            depth += 1
        elif text[position] == "}" and not escaped:
            depth -= 1
        if depth == 0:
            inner = text[start:position].strip()
            return Extracted(inner or None, True, "" if inner else "the last box is empty")
    return Extracted(None, True, "the last box was not closed")


def anchored_answer(text: str) -> Extracted | None:
    """What the reply marks as its answer: last box, else last `####`, else last "answer is …"."""
    box = last_box(text)
    if box is not None:
        return box
    hashes = _HASHES.findall(text)
    if hashes:
        inner = trim_marks(hashes[-1])
        return Extracted(inner or None, True, "" if inner else "nothing after ####")
    said = _SAYS.findall(text)
    inner = trim_marks(said[-1]) if said else ""
    return Extracted(inner) if inner else None


def trim_marks(text: str) -> str:
    """Take markdown emphasis, quotes, a closing full stop and blanks off both ends."""
    return text.strip().strip("*_`\"'“”‘’ \t").removesuffix(".").strip("*_`\"'“”‘’ \t")
