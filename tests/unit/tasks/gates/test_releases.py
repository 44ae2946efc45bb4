"""Which checks can be waived, and what holds after a row of decisions."""

import pytest

from tasks.gates.fields import FieldState
from tasks.gates.releases import Releases, fold_decisions, row_hash, why_bound

ROW = {"prompt": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("code", "found", "part"),
    [
        ("prompt_too_long", "5000 characters", None),
        ("duplicate_prompt", "of row 'a'", None),
        ("answer_no_text", FieldState.NAN_WORD.advice, None),
        ("answer_no_text", FieldState.EMPTY.advice, "nothing in the field"),
        ("prompt_no_text", FieldState.NOT_TEXT.advice, "nothing in the field"),
        ("prompt_missing", FieldState.NONE.advice, "nothing in the field"),
        ("leak", "the prompt of held-out row 'h1'", "held-out"),
        ("duplicate_id", "of row 'a'", "booked by id"),
        ("unparseable_answer", "no number", "no verifier"),
        ("unparseable_line", "line 3", "no row to read"),
        ("made_up", "", "no check that can be waived"),
    ],
)
def test_what_can_be_waived(code: str, found: str, part: str | None) -> None:
    bound = why_bound(code, f"{code}: {found}")
    assert bound is None if part is None else part in str(bound)


def decision(action: str, code: str = "prompt_too_long", row_id: str | None = "r") -> dict:
    return {"action": action, "code": code, "row_sha256": row_hash(ROW), "row_id": row_id}


def test_the_last_decision_on_a_row_and_check_counts() -> None:
    held = fold_decisions([decision("release"), decision("release", "duplicate_prompt")])
    assert held.of(dict(ROW)) == {"prompt_too_long", "duplicate_prompt"}
    assert held.by_id == {"r": held.of(ROW)}
    assert held.of({**ROW, "answer": "2"}) == frozenset()
    withdrawn = fold_decisions([decision("release"), decision("withdraw")])
    assert withdrawn == Releases({}, {})
    again = fold_decisions([decision("release"), decision("withdraw"), decision("release")])
    assert again.of(ROW) == {"prompt_too_long"}


def test_a_check_that_binds_is_not_waived_whatever_a_line_says() -> None:
    assert fold_decisions([decision("release", "leak")]).of(ROW) == frozenset()


def test_a_row_without_an_id_is_known_by_its_content_alone() -> None:
    held = fold_decisions([decision("release", row_id=None)])
    assert held.of(ROW) == {"prompt_too_long"} and held.by_id == {}
