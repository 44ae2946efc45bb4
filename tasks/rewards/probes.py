"""Known answers: what a healthy verifier says of pairs whose verdict is certain."""

from tasks.rewards.verdict import Outcome
from tasks.rewards.verifiers import ANSWER_KINDS, UnknownAnswerKindError

Probe = tuple[str, str, Outcome]
"""Gold, reply, right outcome."""

_OPEN_THINK = "<think>so far "


def known_answer_probes(answer_kind: str) -> list[Probe]:
    """Probes of one kind, with right, wrong and missing answers.

    The reward sentinel and the start-up health check run them through `verify` on the executor
    that training uses (A12).

    Raises:
        UnknownAnswerKindError: no verifier has this name.
    """
    if answer_kind not in ANSWER_KINDS:
        raise UnknownAnswerKindError(answer_kind)
    right, wrong, gold = {
        "number": ("34*7-52=186", "34*7-52=185", "186"),
        "code": ("033", "33", "033"),
        "math": (r"so it is \boxed{0.5}", r"so it is \boxed{2}", r"\frac{1}{2}"),
        "text": ("The answer is Paris.", "The answer is Rome.", "paris"),
    }[answer_kind]
    probes = [
        (gold, right, Outcome.CORRECT),
        (gold, wrong, Outcome.WRONG),
        (gold, "", Outcome.NO_ANSWER),
        (gold, _OPEN_THINK + right, Outcome.NO_ANSWER),
        (gold, f"<think>{wrong}</think>{right}", Outcome.CORRECT),
        ("", right, Outcome.UNSCORED),
    ]
    if answer_kind == "number":
        probes += [("-3", "34-37=-3", Outcome.CORRECT), ("-3", "3", Outcome.WRONG)]
    if answer_kind == "math":
        probes += [(r"\sqrt{8}", r"\boxed{2\sqrt{2}}", Outcome.CORRECT)]
    return probes
