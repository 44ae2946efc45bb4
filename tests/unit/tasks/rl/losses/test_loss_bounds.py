"""One handle on every loss's bounds, and the annealing and alarm that turn it."""

import pytest
from loss_oracle import LOSSES

from configs.schema.rl_losses import (
    Cispo,
    ClipWidening,
    DecoupledPpo,
    Gspo,
    IcePop,
    PpoClip,
    PpoSymmetric,
    PpoWidening,
    Tis,
)
from tasks.rl.controllers import loss_at
from tasks.rl.losses import scaled


@pytest.mark.parametrize(
    ("config", "bounds"),
    [
        (PpoClip(), {"clip_low": 0.1, "clip_high": 0.14, "dual_clip": 3.0}),
        (Cispo(), {"clip_low": 0.5, "clip_high": 2.0}),
        (Gspo(), {"clip_low": 1.5e-4, "clip_high": 2e-4}),
        (Tis(), {"cap": 1.5}),
        (IcePop(), {"low": 0.75, "high": 3.0}),
        (DecoupledPpo(), {"clip_low": 0.1, "clip_high": 0.14}),
    ],
)
def test_half_the_distance_from_one_by_hand(config, bounds):
    halved = scaled(config, 0.5)
    assert {name: getattr(halved, name) for name in bounds} == pytest.approx(bounds)


def test_the_correction_inside_decoupled_ppo_is_scaled_too():
    assert scaled(DecoupledPpo(), 0.5).correction.cap == pytest.approx(1.5)
    band = scaled(DecoupledPpo(correction=IcePop()), 0.5).correction
    assert (band.low, band.high) == pytest.approx((0.75, 3.0))


@pytest.mark.parametrize("name", LOSSES)
def test_all_of_the_width_changes_no_bound_and_half_changes_only_bounds(name):
    config = LOSSES[name]
    assert scaled(config, 1.0) == config.model_copy(update={"widening": None})
    before, after = config.model_dump(), scaled(config, 0.5).model_dump()
    changed = {key for key in before if before[key] != after[key]} - {"widening", "correction"}
    assert changed == before.keys() & {"clip_low", "clip_high", "low", "high", "cap"}


def test_presets_of_the_two_widths():
    assert (1 - PpoSymmetric().clip_low, 1 + PpoSymmetric().clip_high) == (0.8, 1.2)
    start, middle, end = (loss_at(PpoWidening(), step) for step in (0, 50, 100))
    assert (start.clip_low, start.clip_high) == pytest.approx((0.1, 0.1))
    assert (middle.clip_low, middle.clip_high) == pytest.approx((0.15, 0.15))
    assert (end.clip_low, end.clip_high) == (0.2, 0.2)
    assert loss_at(PpoWidening(), 10**6) == end


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_may_widen_and_be_tightened(name):
    config = LOSSES[name].model_copy(
        update={"widening": ClipWidening(start=0.2, end=1.0, over_steps=8)}
    )
    plain = config.model_copy(update={"widening": None})
    # At step 4 the width is .2 + .8/2 = .6; an alarm that halves it leaves .3.
    assert loss_at(config, 4) == scaled(plain, 0.2 + 0.8 * 0.5)
    assert loss_at(config, 4, tightness=0.5) == scaled(plain, (0.2 + 0.8 * 0.5) * 0.5)
    assert loss_at(config, 8) == plain
    assert loss_at(plain, 0) == plain
