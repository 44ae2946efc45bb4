"""The flag for money spent on less learning, on stretches written by hand."""

import json

import pytest

from tasks.rl.divergence import HALF, DivergenceFlag


def seen(flag: DivergenceFlag, *stretches: tuple[float, float]) -> list[int]:
    """Steps at which it is flagged, from a stretch of equal steps each."""
    steps = [pair for pair in stretches for _ in range(HALF)]
    return [i for i, pair in enumerate(steps, 1) if flag.observe(*pair) is not None]


@pytest.mark.parametrize(
    ("stretches", "flagged"),
    [
        ([(0.9, 0.8), (0.9, 0.8), (0.9, 0.8)], []),
        # 5 of 6 later steps at half the share: the mean is 7/12 of what it was, under 3/4 from the
        # third low step on; but two whole stretches must have been seen.
        ([(0.9, 0.8), (0.9, 0.4)], [12]),
        ([(0.9, 0.8), (0.9, 0.8), (0.9, 0.4)], [15]),
        ([(0.9, 0.8), (0.5, 0.4)], []),  # less work, less learnt: no divergence
        ([(0.9, 0.8), (0.86, 0.4)], [12]),  # within what counts as steady
        ([(0.5, 0.4), (0.9, 0.8)], []),
        ([(0.9, 0.8), (0.9, 0.61)], []),  # a fall of less than a quarter
        ([(0.9, 0.0), (0.9, 0.0)], [12]),  # nothing effective at all
        ([(0.9, 0.8), (0.9, 0.4), (0.9, 0.4)], [12]),  # said once
    ],
)
def test_it_flags_a_steady_cost_that_buys_less(stretches, flagged):
    assert seen(DivergenceFlag(), *stretches) == flagged


def test_its_words_name_both_sides():
    flag = DivergenceFlag()
    found = [flag.observe(0.9, share) for share in [0.8] * HALF + [0.2] * HALF][-1]
    assert "busy 90% of the time (90% before) and 20% of the samples are effective (80% before" in (
        str(found)
    )


def test_a_resumed_run_flags_where_the_other_would_have():
    whole, first, second = DivergenceFlag(), DivergenceFlag(), DivergenceFlag()
    steps = [(0.9, 0.8)] * (HALF + 2) + [(0.9, 0.3)] * HALF
    expected = [whole.observe(*pair) is not None for pair in steps]
    got = [first.observe(*pair) is not None for pair in steps[:9]]
    second.load_state(json.loads(json.dumps(first.state_dict())))
    got += [second.observe(*pair) is not None for pair in steps[9:]]
    assert got == expected and sum(got) == 1
