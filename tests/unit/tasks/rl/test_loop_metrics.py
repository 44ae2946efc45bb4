"""Figures of a step worked out by hand, and which counts are shown from when on."""

import pytest

from tasks.rl.learner import StepReport
from tasks.rl.loop_metrics import CycleMeter
from tasks.rl.rollout_worker import Harvest, Refusal
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn

REPORT = StepReport(1, False, 1.5, {"accuracy": 0.5, "effective_share": 0.75})


def rollout(name: str, steps: tuple[int, ...], **tools: int) -> Rollout:
    """An episode with one sampled token a turn, each of its own policy step."""
    turns = tuple(
        Turn(i, i + 1, StopReason.END_OF_TURN, PolicyVersion(0, step))
        for i, step in enumerate(steps)
    )
    size = len(steps)
    return Rollout(
        name, "row", "0", (1,) * size, (True,) * size, (-1.0,) * size, turns, 0.9, **tools
    )


def group(*rollouts: Rollout) -> Group:
    """Graded right, wrong, right, …"""
    scored = (ScoredRollout(r, 1.0, float(i % 2 == 0)) for i, r in enumerate(rollouts))
    return Group("0", "row", tuple(scored))


def test_a_step_by_hand():
    meter = CycleMeter()
    once = rollout("0.0.0", (3,), tool_calls=3, tool_errors=2, tool_timeouts=1)
    carried = rollout("0.0.1", (3, 4), tool_calls=1)
    meter.generated(Harvest((once, carried), 3, (Refusal("0.0.2", "0", "NaN"),), 2), 0.9)
    metrics = meter.trained([group(once, carried)], [1], REPORT)
    by_hand = {
        "accuracy": 0.5,
        "effective_share": 0.75,
        "staleness_mean": 1.0,
        "staleness_max": 1.0,
        "skipped_steps": 0.0,
        "mixed_groups_share": 1.0,
        "trained_tokens_mean": 1.5,
        "generated_tokens_mean": 1.5,
        "carried_share": 0.5,
        "tool_error_share": 2 / 4,
        "tool_timeout_share": 1 / 4,
        "abandoned_tool_calls": 2.0,
        "refused_samples": 1.0,
        "temperature": 0.9,
    }
    assert metrics == pytest.approx(by_hand)
    assert (meter.counts["samples"], meter.effective_samples, meter.max_staleness_seen) == (
        2,
        1.5,
        1,
    )


def test_shares_are_of_a_cycle_and_counts_of_the_run():
    """A count nobody has counted is no metric; once counted it stays one."""
    meter = CycleMeter()
    quiet, calls = rollout("0.0.0", (0,)), rollout("1.0.0", (0,), tool_calls=1)
    meter.generated(Harvest((quiet,), 1), 1.0)
    first = meter.trained([group(quiet)], [0], REPORT)
    assert not {"abandoned_tool_calls", "refused_samples", "tool_timeout_share"} & set(first)
    for left_running in (1, 0):
        meter.generated(Harvest((calls,), 1, (), left_running), 1.0)
        step = meter.trained([group(calls)], [0], REPORT)
        assert (step["abandoned_tool_calls"], step["tool_timeout_share"]) == (1.0, 0.0)
    last = meter.trained([group(quiet)], [0], REPORT)
    assert last["abandoned_tool_calls"] == 1.0 and "tool_timeout_share" not in last


def test_a_resumed_meter_goes_on_counting():
    meter, resumed = CycleMeter(), CycleMeter()
    meter.count("abandoned_tool_calls", 3)
    meter.effective_samples, meter.max_staleness_seen = 2.5, 4
    resumed.load_state(meter.state_dict())
    resumed.count("abandoned_tool_calls", 2)
    assert resumed.counts == {"abandoned_tool_calls": 5}
    assert (resumed.effective_samples, resumed.max_staleness_seen) == (2.5, 4)
    assert resumed.state_dict()["counts"] == {"abandoned_tool_calls": 5}


def test_a_name_nobody_knows_is_not_counted():
    with pytest.raises(AssertionError, match="abandonned"):
        CycleMeter().count("abandonned")
