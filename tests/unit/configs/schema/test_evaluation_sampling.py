"""Temperatures that say what is meant."""

import pytest
from pydantic import ValidationError

from configs.schema.evaluation import EvaluationSampling


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_greedy_or_drawn(temperature):
    assert EvaluationSampling(temperature=temperature).temperature == temperature


@pytest.mark.parametrize("temperature", [1e-30, 0.009, -1.0, float("nan")])
def test_nothing_in_between(temperature):
    with pytest.raises(ValidationError, match="temperature"):
        EvaluationSampling(temperature=temperature)
