"""The GSM8K form: `#### N` after a solution whose calculations stand in `<<…>>`."""

import re

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_FINAL = re.compile(r"^\s*####[ \t]*(.*?)\s*\Z", re.MULTILINE)


def final_answer(answer: str) -> str | None:
    """What follows the last `####` line, as it stands; None without one."""
    found = _FINAL.findall(answer)
    return found[-1] if found and found[-1] else None


def clean_solution(answer: str) -> str:
    """The solution without calculator annotations; its `#### N` stays."""
    return _ANNOTATION.sub("", answer).strip()


def steps(answer: str) -> int:
    """Calculations in the solution: annotations, or lines where it has none."""
    annotated = len(_ANNOTATION.findall(answer))
    if annotated:
        return annotated
    body = _FINAL.sub("", answer)
    return sum(1 for line in body.split("\n") if line.strip())


def band(answer: str) -> str:
    """`easy` up to 2 steps, `medium` up to 4, else `hard`."""
    count = steps(answer)
    if count <= 2:
        return "easy"
    return "medium" if count <= 4 else "hard"
