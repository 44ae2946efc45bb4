"""Which alerts the end of a run calls for."""

from typing import Any

import pytest

from configs.schema.operations import AlertsConfig
from flows.alerts.of_runs import run_alerts
from tasks.supervise import StageFailedError

STAGES = ("data", "sft", "rl", "evaluation", "quantize", "package")


def summary(*, cached: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "run_id": "r1",
        "profile": "micro",
        "stages": {name: {"status": "completed", "cached": cached} for name in STAGES},
        "heldout": {"promoted": True},
        "quant": {"Q8_0": {"ships": True, "why": "fine"}},
        "cost": {"usd": 2.0, "device_s": 3600.0, "usd_per_device_hour": 2.0},
        **more,
    }


def alerts(body: dict[str, Any], error: Exception | None = None, **config: Any) -> list:
    return run_alerts(AlertsConfig(**config), body, error)


def failed(kind: str, stage: str = "rl") -> StageFailedError:
    return StageFailedError(stage, kind, "what went wrong", "do this", "log.txt")


def test_a_run_that_went_well_tells_nobody() -> None:
    assert alerts(summary()) == []
    assert alerts({}) == []


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("Killed", "failure"),
        ("OutOfMemoryError", "failure"),
        ("SentinelTrippedError", "breaker"),
        ("NothingToLearnError", "breaker"),
        ("RewardGateError", "gate"),
        ("DataGateError", "gate"),
    ],
)
def test_an_error_is_a_failure_a_gate_or_a_breaker(kind: str, event: str) -> None:
    (alert,) = alerts(summary(), failed(kind))
    assert (alert.event, alert.key) == (event, f"{event}:micro:rl:{kind}")
    assert kind in alert.title and "stage rl" in alert.title
    assert alert.body == "what went wrong\ndo this\nrun r1, profile micro"


def test_an_error_outside_a_stage_is_named_by_its_class() -> None:
    (alert,) = alerts(summary(), ValueError("no good"))
    assert alert.key == "failure:micro:run:ValueError"
    assert alert.title == "rl-pipeline micro: the run failed (ValueError)"


def test_the_names_of_errors_are_those_of_classes_there_are() -> None:
    import importlib

    where = {
        "DataGateError": "tasks.data.errors",
        "NoTrainingRowsError": "tasks.data.errors",
        "RewardGateError": "tasks.rl.errors",
        "PromotionRefusedError": "tasks.evaluation.stage",
        "ParityGateError": "quantize.errors",
        "NothingShipsError": "deployment.jetson.errors",
        "SentinelTrippedError": "tasks.rl.sentinel",
        "NothingToLearnError": "tasks.rl.errors",
        "SyncProofError": "tasks.rl.errors",
    }
    from flows.alerts.of_runs import BREAKER_ERRORS, GATE_ERRORS

    assert set(where) == GATE_ERRORS | BREAKER_ERRORS
    for name, module in where.items():
        assert issubclass(getattr(importlib.import_module(module), name), Exception)


def test_gates_that_let_the_run_go_on_are_told_together() -> None:
    body = summary(
        heldout={"promoted": False},
        quant={"Q8_0": {"ships": True}, "IQ2_M": {"ships": False, "why": "KL 0.9 above 0.5"}},
        rl={"reward_gate": {"cycles": 6, "failed": 2, "codes": {"variance": 2, "mean": 1}}},
    )
    (alert,) = alerts(body)
    assert (alert.event, alert.key) == ("gate", "gate:micro:held-out,IQ2_M,rewards")
    assert "IQ2_M: does not ship: KL 0.9 above 0.5" in alert.body
    assert "2 of 6 cycles failed: mean 1×, variance 2×" in alert.body


def test_what_a_reused_stage_said_is_not_told_again() -> None:
    body = summary(
        cached=True,
        heldout={"promoted": False},
        quant={"IQ2_M": {"ships": False}},
        rl={"reward_gate": {"cycles": 6, "failed": 2}},
    )
    assert alerts(body, max_run_usd=1.0) == []


@pytest.mark.parametrize("promoted", [None, True])
def test_no_verdict_is_no_failed_gate(promoted: bool | None) -> None:
    assert alerts(summary(heldout={"promoted": promoted})) == []


@pytest.mark.parametrize(
    ("usd", "limit", "told"),
    [(2.0, None, False), (2.0, 2.0, False), (2.01, 2.0, True), (None, 2.0, False)],
)
def test_cost_over_the_limit(usd: float | None, limit: float | None, told: bool) -> None:
    body = summary(cost={"usd": usd, "device_s": 60.0, "usd_per_device_hour": 3.0})
    found = alerts(body, max_run_usd=limit)
    assert [a.event for a in found] == (["cost"] if told else [])
    if told:
        assert "$2.01" in found[0].title and "60 device-seconds at $3.0/h" in found[0].body
