"""The decision on a release in the report: its figures, its gaps, hostile text."""

import json

import pytest
from report_run import HOSTILE, make_run

from flows.report.data import RunFiles
from flows.report.page import render
from flows.report.promotion import promotion_section

DECIDED = {
    "outcome": "candidate",
    "reason": "accuracy minus that of calculator v2 is -0.0300",
    "model": "calculator",
    "version": 3,
    "aliases": "moved",
    "evidence": {
        "champion": "ab" * 32,
        "candidate_accuracy": 0.81,
        "champion_accuracy": 0.84,
        "delta": -0.03,
        "ci95": [-0.05, -0.01],
        "margin": 0.0,
        "problems": 2400,
    },
}


@pytest.fixture
def decided(tmp_path):
    """A run with this decision in its summary."""

    def build(promotion) -> RunFiles:
        run = make_run(tmp_path)
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "promotion": promotion}))
        return RunFiles(run)

    return build


def test_figures_are_those_of_the_comparison(decided):
    found = promotion_section(decided(DECIDED))
    assert (found["name"], found["outcome"], found["tone"]) == ("calculator v3", "candidate", "bad")
    facts = dict(found["facts"])
    assert facts["Candidate, quantised"] == "81.0 %" and facts["Champion, quantised"] == "84.0 %"
    assert facts["Candidate minus champion"] == "\N{MINUS SIGN}3.0"
    assert facts["95 % interval"] == "\N{MINUS SIGN}5.0 … \N{MINUS SIGN}1.0"
    assert facts["Held-out problems, paired"] == "2,400"
    assert facts["Champion's bundle"] == "abababababab"


@pytest.mark.parametrize("evidence", [None, {}, {"delta": float("nan"), "ci95": "x"}, []])
def test_what_is_unknown_is_left_out_and_never_0(decided, evidence):
    found = promotion_section(decided({**DECIDED, "outcome": "promoted", "evidence": evidence}))
    assert found["facts"] == [] and found["tone"] == "good"


def test_nothing_decided_says_so(decided):
    assert "Nothing was decided" in render(decided(None))


def test_hostile_reasons_are_escaped(decided):
    page = render(decided({**DECIDED, "reason": HOSTILE, "aliases": "pending"}))
    assert HOSTILE not in page and "aliases could not be moved yet" in page
