"""The conversations SFT learns, made from training rows only."""

from collections.abc import Sequence

from configs.schema.data import CalculatorSource, DataConfig
from tasks.data.candidate import Candidate
from tasks.environments.calculator_problems import calculator_demonstrations
from tasks.environments.row import Demonstration


def demonstrations(train: Sequence[Candidate], config: DataConfig) -> list[Demonstration]:
    """Demonstrations of the training side.

    Calculator rows are answered at once or by the tool; chat rows are their own conversation; other
    rows are answered by their solution, or by the answer alone where they have none.
    """
    source = config.source
    if not isinstance(source, CalculatorSource):
        return [_demonstration(candidate) for candidate in train]
    generated = [candidate.row() for candidate in train if not candidate.dropped]
    shown = calculator_demonstrations(
        generated,
        source.demonstrations,
        source.tool_share,
        config.seed,
        answer_share=source.answer_share,
    )
    return shown + [_demonstration(candidate) for candidate in train if candidate.dropped]


def _demonstration(candidate: Candidate) -> Demonstration:
    messages = candidate.messages or [
        {"role": "user", "content": candidate.prompt},
        {"role": "assistant", "content": candidate.solution or candidate.answer},
    ]
    return Demonstration(id=f"{candidate.id}-demo", row_id=candidate.id, messages=messages)
