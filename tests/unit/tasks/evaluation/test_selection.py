"""Which rows are asked, and the proof that none was trained on."""

import pytest

from tasks.environments.row import Demonstration, Row
from tasks.evaluation.selection import (
    HeldoutEmptyError,
    HeldoutOverlapError,
    refuse_overlap,
    stratified,
)


def rows(*bands):
    return [Row(id=f"r{i}", prompt=f"p{i}", answer="1", band=b) for i, b in enumerate(bands)]


def test_places_follow_the_proportions():
    # 6 easy, 3 hard: of 6 places 4 and 2
    picked = stratified(rows(*["easy"] * 6, *["hard"] * 3), 6)
    assert [r.id for r in picked] == ["r0", "r1", "r2", "r3", "r6", "r7"]


def test_first_rows_of_a_band_in_file_order():
    picked = stratified(rows("hard", "easy", "hard", "easy"), 2)
    assert [r.id for r in picked] == ["r0", "r1"]


def test_small_band_does_not_vanish():
    picked = stratified(rows(*["easy"] * 99, "hard"), 2)
    assert sorted(r.band for r in picked) == ["easy", "hard"]


def test_larger_limit_only_adds():
    everything = rows(*["easy"] * 7, *["medium"] * 5, *["hard"] * 2)
    before: set[str] = set()
    for limit in range(1, 15):
        now = {r.id for r in stratified(everything, limit)}
        assert len(now) == limit
        assert before < now
        before = now


def test_limit_above_the_rows_takes_all():
    assert len(stratified(rows("a", "b"), 512)) == 2


def test_no_rows_is_an_error():
    with pytest.raises(HeldoutEmptyError, match=r"data\.source\.heldout"):
        stratified([], 8)


def heldout(prompt="What is 2+3?", row_id="h"):
    return [Row(id=row_id, prompt=prompt, answer="5")]


def test_distinct_rows_pass():
    refuse_overlap(heldout(), [Row(id="t", prompt="What is 2+4?", answer="6")], [])


def test_same_id_is_refused():
    with pytest.raises(HeldoutOverlapError, match="'h' is the id of a training row"):
        refuse_overlap(heldout(), [Row(id="h", prompt="other", answer="6")], [])


@pytest.mark.parametrize(
    "prompt", ["WHAT is 2+3?", "  What\tis\n2+3? ", "Ｗhat is ２+３?", "What\u00a0is 2+3?"]
)
def test_same_prompt_in_another_dress_is_refused(prompt):
    with pytest.raises(HeldoutOverlapError, match="prompt of training row 't'"):
        refuse_overlap(heldout(), [Row(id="t", prompt=prompt, answer="5")], [])


def test_sft_demonstrations_count_as_training():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "what is  2+3?"},
        {"role": "assistant", "content": "5"},
    ]
    with pytest.raises(HeldoutOverlapError, match="demonstration 'd'"):
        refuse_overlap(heldout(), [], [Demonstration(id="d", row_id="t", messages=messages)])
    with pytest.raises(HeldoutOverlapError, match="row of demonstration 'd'"):
        refuse_overlap(heldout("other"), [], [Demonstration(id="d", row_id="h", messages=messages)])
