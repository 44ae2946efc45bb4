"""The DeepSpeed wrapper: a bad gradient moves nothing, is counted, and does not pass unnoticed."""

import math
import os

import psutil
import pytest
import torch

from configs.schema.training import DeepSpeedSettings, Optimiser
from tasks.models.errors import NonFiniteStepError, WeightsMismatchError
from tasks.models.ranks import whole
from tasks.models.train_engine import TrainEngine, learning_rate

KINDS = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("float32", "bfloat16")]


def engine_of(stage: int = 0, dtype: str = "float32", **optimiser) -> TrainEngine:
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2, bias=False)
    settings = {"lr": 0.1, "warmup_steps": 0, "weight_decay": 0.1} | optimiser
    return TrainEngine(
        module.bfloat16() if dtype == "bfloat16" else module,
        Optimiser.model_validate(settings),
        DeepSpeedSettings(zero_stage=stage, dtype=dtype),
        total_steps=5,
    )


def attempt(engine: TrainEngine, value: float = 1.0):
    """One step on inputs of `value`: an infinite one makes every gradient infinite."""
    weight = engine.module.weight
    engine.backward(engine.forward(torch.full((3, 4), value, dtype=weight.dtype)).float().sum())
    return engine.step()


def weight_of(engine: TrainEngine) -> torch.Tensor:
    with whole([engine.module.weight]):  # split under stage 3
        return engine.module.weight.detach().clone()


def everything(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {"weight": weight_of(engine), **engine.state_tensors()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(("stage", "dtype"), KINDS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a07_a_step_with_a_bad_gradient_moves_nothing_and_is_counted(stage, dtype, bad):
    engine = engine_of(stage, dtype)
    for step in range(1, 6):
        before = everything(engine)
        stats = attempt(engine, bad if step == 3 else 1.0)
        assert stats.skipped == (step == 3)
        assert same(before, everything(engine)) == (step == 3)
        assert math.isfinite(stats.grad_norm) == (step != 3)
    assert (engine.steps_taken, engine.skipped_steps) == (4, 1)


@pytest.mark.parametrize("stage", [0, 2])
def test_a07_a_loss_that_is_no_number_moves_nothing_though_its_gradient_is_one(stage):
    engine = engine_of(stage)
    before = everything(engine)
    output = engine.forward(torch.ones(3, 4)).sum()
    engine.backward(output + torch.tensor(math.nan))  # the gradient alone would be finite
    assert engine.step().skipped and same(before, everything(engine))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a07_a_skipped_step_leaves_no_gradient_behind(stage):
    with_bad, without = engine_of(stage), engine_of(stage)
    for value in (1.0, math.nan, 2.0):
        attempt(with_bad, value)
    for value in (1.0, 2.0):
        attempt(without, value)
    assert same(everything(with_bad), everything(without))


def test_a07_the_schedule_counts_steps_taken_not_attempts():
    engine = engine_of(lr=1.0, warmup_steps=3)
    rates = [attempt(engine, v).lr for v in (1.0, math.nan, math.nan, 1.0, 1.0, 1.0)]
    assert rates == [0.25, 0.5, 0.5, 0.5, 0.75, 1.0]


def test_a07_skips_in_a_row_end_the_run():
    engine = engine_of(max_skipped_in_a_row=3)
    for value in (math.nan, math.nan, 1.0, math.nan, math.nan):
        attempt(engine, value)
    assert engine.skipped_steps == 4
    with pytest.raises(NonFiniteStepError, match=r"3 optimiser steps in a row.*learning rate"):
        attempt(engine, math.nan)


def test_a07_one_skip_allowed_means_none():
    with pytest.raises(NonFiniteStepError):
        attempt(engine_of(max_skipped_in_a_row=1), math.inf)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_norm_is_taken_before_clipping_and_the_step_after(stage):
    # d(sum)/dw = 3 for each of 8 weights: norm 3·√8. Adam's first step is lr·sign, decay apart.
    engine = engine_of(stage, weight_decay=0.0, grad_clip=0.5)
    before = weight_of(engine)
    assert attempt(engine).grad_norm == pytest.approx(3 * math.sqrt(8), rel=1e-5)
    torch.testing.assert_close(before - weight_of(engine), torch.full((2, 4), 0.1))
    first = engine.state_tensors()["0.exp_avg"].flatten()
    torch.testing.assert_close(first, torch.full((8,), 0.1 * 0.5 / math.sqrt(8)))  # (1−β₁)·clipped


@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_micro_batches_add_up_to_one_step(stage, dtype):
    one, many = engine_of(stage, dtype), engine_of(stage, dtype)
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(one.module.weight.dtype)
    one.backward((one.forward(rows).float() ** 2).sum() / 6)
    for part in rows.split(2):
        many.backward((many.forward(part).float() ** 2).sum() / 6)
    one.step(), many.step()
    tolerance = 1e-6 if dtype == "float32" else 2e-3
    torch.testing.assert_close(weight_of(one), weight_of(many), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_a_resumed_engine_goes_on_as_if_never_stopped(stage, dtype):
    engine = engine_of(stage, dtype)
    for value in (1.0, -2.0):
        attempt(engine, value)
    kept, weight = engine.state_tensors(), weight_of(engine)
    resumed = engine_of(stage, dtype)
    with torch.no_grad(), whole([resumed.module.weight], write=True):
        resumed.module.weight.copy_(weight)
    resumed.load_state_tensors(kept, steps_taken=2)
    for value in (0.5, 3.0):
        assert attempt(engine, value) == attempt(resumed, value)
    assert same(everything(engine), everything(resumed))
    assert resumed.steps_taken == engine.steps_taken == 4


def test_a_learner_alone_listens_on_loopback_only_and_passes_no_address_on():
    engine_of()
    open_ports = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in open_ports), open_ports
    assert torch.distributed.is_initialized() and "MASTER_PORT" not in os.environ


def test_optimiser_state_of_another_model_is_refused():
    engine = engine_of()
    with pytest.raises(WeightsMismatchError, match=r"1\.exp_avg"):
        engine.load_state_tensors({"1.exp_avg": torch.zeros(2, 4)}, 1)
    with pytest.raises(WeightsMismatchError, match=r"0\.exp_avg"):
        engine.load_state_tensors({"0.exp_avg": torch.zeros(4, 2)}, 1)
    for key in ("foreign", "-1.exp_avg", "x.exp_avg", "0.", "0"):
        with pytest.raises(WeightsMismatchError, match=rf"state {key} of shape \(2, 4\)"):
            engine.load_state_tensors({key: torch.zeros(2, 4)}, 1)
    assert engine.steps_taken == 0


def test_learning_rate_by_hand():
    # Warm-up over 2: a third, two thirds; then 1 at step 2, and down to a tenth at the last, 6.
    linear = Optimiser(lr=1.0, warmup_steps=2, decay="linear")
    rates = [learning_rate(linear, s, 7) for s in range(9)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1])
    constant = Optimiser(lr=2.0, warmup_steps=0)
    assert [learning_rate(constant, s, 3) for s in (0, 2, 9)] == [2.0, 2.0, 2.0]
    assert learning_rate(linear, 2, 3) == 1.0  # warm-up fills the run
