"""The rules of promotion on figures worked out by hand."""

import json

import pytest

from flows.promotion.rules import (
    gate_failures,
    held_back,
    judge_challenge,
    not_finite,
    objection,
)
from flows.report.text import finite
from tasks.artifacts import write_json
from tasks.tracking.promotion_ledger import LedgerState, PromotionLedger
from tests.small_releases import write_run

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def champion(tmp_path):
    """A release that could be champion."""
    return write_run(tmp_path / "runs", "r1").model_copy(update={"version": 1})


def met(value, low, high, problems=100, **sides):
    """A challenge's result."""
    return {
        "problems": problems,
        "delta": {"value": value, "ci95": [low, high]},
        "candidate": {"accuracy": 0.5},
        "champion": {"accuracy": 0.5},
        **sides,
    }


@pytest.mark.parametrize(
    ("low", "margin", "passed"),
    [
        (0.0, 0.0, True),  # equal is enough
        (-0.0, 0.0, True),
        (0.01, 0.0, True),
        (-0.001, 0.0, False),
        (-0.03, 0.03, True),
        (-0.0301, 0.03, False),
        (-1.0, 1.0, True),
    ],
)
def test_the_lower_end_decides(champion, low, margin, passed):
    judged = judge_challenge(met(0.02, low, 0.2), champion, margin)
    assert judged.passed is passed
    assert judged.evidence["ci95"] == [low, 0.2]
    assert judged.evidence["champion"] == champion.bundle_sha256
    assert "on 100 held-out problems" in judged.reason
    assert f"promotion.margin={margin:g}" in judged.reason


@pytest.mark.parametrize(
    "result",
    [
        met(NAN, NAN, NAN),
        met(0.5, NAN, 0.9),
        met(0.5, 0.4, INF),
        met(NAN, 0.4, 0.9),
        met(0.5, -INF, 0.9),
        met(0.5, "0.4", 0.9),
        met(0.5, True, 0.9),
        met(0.5, 0.4, 0.9, problems=0),
        {"problems": 10, "delta": {"value": 0.5, "ci95": [0.4]}},
        {"problems": 10, "delta": None},
        {},
    ],
)
def test_a21_what_is_not_a_finite_figure_never_promotes(champion, result):
    judged = judge_challenge(result, champion, margin=1.0)
    assert judged.passed is False
    assert "no finite result" in judged.reason
    json.dumps(judged.evidence, allow_nan=False)  # can be written down


@pytest.mark.parametrize(
    ("lows", "wins"),
    [
        ([NAN], []),
        ([NAN, 0.1], [1]),
        ([0.1, NAN], [0]),
        ([0.1, NAN, 0.2], [0, 2]),
        ([NAN, NAN, NAN], []),
        ([0.0, NAN], [0]),
    ],
)
def test_a21_nan_as_only_first_middle_or_last_run(tmp_path, lows, wins):
    """Run after run against the ledger: the diverged one is never champion, the others are."""
    runs = tmp_path / "runs"
    ledger = PromotionLedger(runs, "calc")
    start = write_run(runs, "start")
    ledger.append("promote", start, reason="the champion before")
    champions = []
    for number, low in enumerate(lows):
        release = write_run(runs, f"r{number}")
        champion = ledger.champion()
        judged = judge_challenge(met(low, low, 0.5), champion, margin=0.0)
        action = "promote" if judged.passed else "candidate"
        ledger.append(action, release, reason=judged.reason, evidence=judged.evidence)
        if ledger.champion() != champion:
            champions.append(number)
    assert champions == wins
    best = f"r{wins[-1]}" if wins else "start"
    assert ledger.champion().run_id == best


def test_a21_a_gate_over_nan_is_a_failed_gate(champion):
    summary = champion.records["evaluation"].path / "summary.json"
    summary.write_text('{"gate": {"passed": true, "reasons": []}, "rl": {"accuracy": NaN}}')
    (failure,) = gate_failures(champion.records)
    assert failure == "the evaluation has figures that are not finite: rl.accuracy"
    parity = champion.records["quantize"].path / "parity.json"
    parity.write_text('{"quant": {"Q8_0": {"ships": true, "ci": [0.1, -Infinity]}}}')
    assert gate_failures(champion.records)[1:] == [
        "the parity of Q8_0 has figures that are not finite: ci[1]"
    ]


def test_finite_and_not_finite():
    assert finite(1) == 1.0
    assert [finite(v) for v in (NAN, INF, -INF, None, "1", True)] == [None] * 6
    body = {"a": [1, NAN, {"b": INF}], "c": None, "d": "NaN", "e": {"f": -INF}}
    assert not_finite(body) == ["a[1]", "a[2].b", "e.f"]


def test_gates_that_passed_say_nothing(champion):
    assert gate_failures(champion.records) == []


@pytest.mark.parametrize(
    ("stage", "name", "body", "said"),
    [
        ("data", "gate.json", {"passed": False, "reasons": ["dup"]}, "the data gate failed: dup"),
        ("data", "gate.json", {"passed": "yes"}, "the data gate failed: it left no verdict"),
        ("data", "gate.json", {}, "the data gate failed: it left no verdict"),
        ("evaluation", "summary.json", {}, "the evaluation gate failed: it left no verdict"),
        (
            "evaluation",
            "summary.json",
            {"gate": {"passed": False, "reasons": ["too low", "cut"]}},
            "the evaluation gate failed: too low; cut",
        ),
        ("quantize", "parity.json", {"quant": {"Q8_0": {"ships": False, "why": "KL 9"}}}, "KL 9"),
        ("quantize", "parity.json", {"quant": {"Q8_0": {"ships": "no"}}}, "does not ship"),
        ("quantize", "parity.json", {"quant": {"F16": {"ships": True}}}, "not among the judged"),
        ("quantize", "parity.json", [], "holds no JSON object"),
    ],
)
def test_a_gate_that_failed_or_left_no_verdict_is_named(champion, stage, name, body, said):
    write_json(champion.records[stage].path / name, body)
    (failure,) = gate_failures(champion.records)
    assert said in failure


def test_missing_files_and_records_are_failures(champion):
    (champion.records["data"].path / "gate.json").unlink()
    assert "cannot be read" in gate_failures(champion.records)[0]
    assert gate_failures({}) == [
        "there is no output of data",
        "there is no output of evaluation",
        "there is no output of quantize",
    ]


def test_held_back_until_a_person_promotes_it(tmp_path, champion):
    ledger = PromotionLedger(tmp_path / "runs", "calc")
    second = write_run(tmp_path / "runs", "r2")
    ledger.append("promote", champion, reason="first")
    ledger.append("promote", second, reason="better")
    assert held_back(ledger.state(), second) is None
    ledger.append("rollback", champion, reason="wrong units")
    assert "only a person promotes it again" in held_back(ledger.state(), second)
    ledger.append("promote", second, reason="was right")
    assert held_back(ledger.state(), second) is None
    third = write_run(tmp_path / "runs", "r3")
    ledger.append("reject", third, reason="rude", actor="ann@x")
    assert held_back(ledger.state(), third).startswith("rejected by ann@x on 20")


def test_objection_names_gates_then_the_champion_not_met(tmp_path, champion):
    runs = tmp_path / "runs"
    assert objection(LedgerState(), champion) is None
    ledger = PromotionLedger(runs, "calc")
    ledger.append("promote", champion, reason="first")
    second = write_run(runs, "r2")
    assert "not been compared with calc v1" in objection(ledger.state(), second)
    facts = {"champion": champion.bundle_sha256, "passed": False}
    ledger.append("candidate", second, reason="3 points worse", evidence=facts)
    assert objection(ledger.state(), second) == "3 points worse"
    ledger.append("candidate", second, reason="good", evidence={**facts, "passed": True})
    assert objection(ledger.state(), second) is None
    ledger.append("promote", second, reason="good")
    assert objection(ledger.state(), champion) is None  # it served before
    write_json(champion.records["data"].path / "gate.json", {"passed": False, "reasons": ["x"]})
    assert objection(ledger.state(), champion) == "the data gate failed: x"
