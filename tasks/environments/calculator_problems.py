"""Arithmetic problems in three difficulty bands, and the conversations SFT learns them from.

Expressions begin and end with a digit, so that a byte-level BPE cuts them the same way in the
prompt and inside the JSON of a tool call.
"""

import random
from collections.abc import Callable, Iterator

from tasks.artifacts import hash_json
from tasks.environments.calculator_tool import evaluate
from tasks.environments.row import Demonstration, Message, Row
from tasks.environments.toolcall import render_tool_call

BANDS = ("easy", "medium", "hard")
"""Easiest first."""
OPERATORS = "+-*"
EASY_PROBLEMS = 99 * 99 * len(OPERATORS)
AFTER_THE_TOOL = 3
"""Index of the final answer in `tool_messages`."""
MAX_EASY_SHARE = 0.9
"""Of the easy problems there are, drawn at most: distinct ones get slow to find near the end."""


class TooManyProblemsError(ValueError):
    """More distinct problems are asked for than the easiest band holds."""


def _easy(rng: random.Random) -> str:
    """One operation, numbers of one or two digits."""
    return f"{rng.randint(1, 99)}{rng.choice(OPERATORS)}{rng.randint(1, 99)}"


def _medium(rng: random.Random) -> str:
    """Two operations, numbers of one or two digits."""
    return _chain(rng, 3)


def _hard(rng: random.Random) -> str:
    """Three operations, with or without brackets, or two on numbers of three digits."""
    form = rng.randrange(3)
    if form == 0:
        return _chain(rng, 3, _three_digits)
    if form == 1:
        return _chain(rng, 4)
    first, inner, last = (_chain(rng, count) for count in (1, 2, 1))
    return f"{first}{rng.choice(OPERATORS)}({inner}){rng.choice(OPERATORS)}{last}"


def _short(rng: random.Random) -> int:
    """A number of one digit, three times in ten, or two."""
    return rng.randint(1, 9) if rng.random() < 0.3 else rng.randint(10, 99)


def _three_digits(rng: random.Random) -> int:
    return rng.randint(100, 999)


def _chain(rng: random.Random, numbers: int, draw: Callable[[random.Random], int] = _short) -> str:
    text = str(draw(rng))
    for _ in range(numbers - 1):
        text += f"{rng.choice(OPERATORS)}{draw(rng)}"
    return text


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "easy": _easy,
    "medium": _medium,
    "hard": _hard,
}


def _shares(rows: int) -> dict[str, int]:
    """Rows of each band, equal to within one."""
    return {
        band: rows // len(BANDS) + (index < rows % len(BANDS)) for index, band in enumerate(BANDS)
    }


def _distinct(make: Callable[[random.Random], str], rng: random.Random) -> Iterator[str]:
    seen = set()
    while True:
        expression = make(rng)
        if expression not in seen:
            seen.add(expression)
            yield expression


def problem(expression: str, band: str) -> Row:
    """The row that asks for the value of `expression`; one in eight asks without `=?`."""
    sha256 = hash_json(expression)
    bare = int(sha256[16:24], 16) % 8 == 0
    return Row(
        id=f"calc-{sha256[:16]}",
        prompt=expression if bare else f"{expression}=?",
        answer=str(evaluate(expression)),
        answer_kind="number",
        band=band,
        source="calculator",
        meta={"expression": expression},
    )


def calculator_problems(
    train_rows: int, heldout_rows: int, seed: int
) -> tuple[list[Row], list[Row]]:
    """Distinct training and held-out problems, about a third of each band, shuffled.

    The same arguments give the same rows everywhere. The held-out rows depend on `heldout_rows`
    and `seed` only, so a larger training set is measured on the same problems.

    Raises:
        TooManyProblemsError: the easy band has too few distinct problems.
    """
    wanted_train, wanted_heldout = _shares(train_rows), _shares(heldout_rows)
    needed = wanted_train["easy"] + wanted_heldout["easy"]
    if needed > MAX_EASY_SHARE * EASY_PROBLEMS:
        most = int(MAX_EASY_SHARE * EASY_PROBLEMS) * len(BANDS)
        raise TooManyProblemsError(
            f"data.source.train_rows={train_rows} plus data.source.heldout_rows={heldout_rows} "
            f"is above the {most} distinct problems that can be made; lower one of them"
        )
    train: list[Row] = []
    heldout: list[Row] = []
    for band in BANDS:
        drawn = _distinct(_MAKERS[band], random.Random(f"calculator {seed} {band}"))
        heldout += [problem(next(drawn), band) for _ in range(wanted_heldout[band])]
        train += [problem(next(drawn), band) for _ in range(wanted_train[band])]
    for rows, name in ((train, "train"), (heldout, "heldout")):
        random.Random(f"calculator {seed} {name}").shuffle(rows)
    return train, heldout


def direct_messages(row: Row) -> list[Message]:
    """The problem answered at once: `34*7-52=186`."""
    return [
        {"role": "user", "content": row.prompt},
        {"role": "assistant", "content": f"{row.meta['expression']}={row.answer}"},
    ]


def tool_messages(row: Row) -> list[Message]:
    """The problem answered by the calculator: call, observation, `186`."""
    call = render_tool_call("calc", {"expression": row.meta["expression"]})
    return [
        {"role": "user", "content": row.prompt},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": row.answer},
        {"role": "assistant", "content": row.answer},
    ]


def calculator_demonstrations(
    rows: list[Row], count: int, tool_share: float, seed: int, *, answer_share: float = 0.0
) -> list[Demonstration]:
    """`count` conversations over `rows`, shares rounded.

    `answer_share` of them begin after the tool has answered, so that only its result is passed on.
    Of the others, `tool_share` call the tool and the rest answer at once. Every row is shown before
    any is shown again; which of them is shown how is drawn by `seed`.
    """
    rng = random.Random(f"demonstrations {seed}")
    answers = round(answer_share * count)
    calls = round(tool_share * (count - answers))
    kinds = [tool_messages] * calls + [direct_messages] * (count - answers - calls)
    forms = [(messages, 0) for messages in kinds] + [(tool_messages, AFTER_THE_TOOL)] * answers
    rng.shuffle(forms)
    order: list[Row] = []
    while len(order) < count:
        order += rng.sample(rows, len(rows))
    return [
        Demonstration(
            id=f"{row.id}-{index}", row_id=row.id, messages=form(row), learn_from=learn_from
        )
        for index, (row, (form, learn_from)) in enumerate(zip(order[:count], forms, strict=True))
    ]
