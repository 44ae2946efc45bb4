"""The promotion gate: unknown never passes."""

import itertools
import json
import math

import pytest

from configs.schema.evaluation import PromotionGate
from tasks.evaluation.gate import GateVerdict, judge

GATE = PromotionGate(min_delta_ci_low=0.0, max_truncated_share=0.2)


def test_passes_above_the_limits():
    verdict = judge(GATE, delta_ci_low=0.4, truncated_share=0.2)
    assert verdict.passed
    assert verdict.reasons == []


def test_interval_that_touches_zero_does_not_pass():
    verdict = judge(GATE, delta_ci_low=0.0, truncated_share=0.0)
    assert not verdict.passed
    assert verdict.reasons == ["lower end of the accuracy difference is 0.0000, not above 0"]


def test_each_check_can_fail_alone():
    assert len(judge(GATE, delta_ci_low=-0.1, truncated_share=0.1).reasons) == 1
    assert len(judge(GATE, delta_ci_low=0.1, truncated_share=0.21).reasons) == 1
    assert len(judge(GATE, delta_ci_low=-0.1, truncated_share=0.21).reasons) == 2


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a21_unknown_or_non_finite_never_passes(bad):
    for low, cut in itertools.chain([(bad, 0.0), (0.5, bad), (bad, bad)]):
        verdict = judge(GATE, delta_ci_low=low, truncated_share=cut)
        assert not verdict.passed
        text = json.dumps(verdict.to_json(), allow_nan=False)  # an unknown is null, not a number
        assert "unknown" in text


def test_no_check_is_no_pass():
    assert not GateVerdict(()).passed
