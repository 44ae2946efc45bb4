"""What a profile may ask of the losses, and what it is told where two wishes contradict."""

import pytest

from configs.load import ConfigError, load_config

DEFAULTS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "ppo_symmetric": {"clip_low": 0.2, "clip_high": 0.2},
    "ppo_widening": {"clip_low": 0.2, "clip_high": 0.2},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.28, "proximal": "exact"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "icepop": {"low": 0.5, "high": 5.0},
    "tis": {"level": "token", "cap": 2.0},
}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("micro", overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_type_brings_its_own_defaults(name):
    loss = load_config("micro", [f"rl.loss.type={name}"]).rl.loss
    assert {key: getattr(loss, key) for key in DEFAULTS[name]} == DEFAULTS[name]
    assert loss.geometric_reject is None


@pytest.mark.parametrize("name", set(DEFAULTS) - {"decoupled_ppo"})
def test_a_ratio_to_the_sampler_is_not_corrected_twice(name):
    said = refused(f"rl.loss.type={name}", "rl.loss.correction.type=tis")
    assert "rl.loss.correction" in said
    assert "twice" in said
    assert "rl.loss.type=decoupled_ppo" in said


def test_decoupled_ppo_takes_either_correction():
    for kind in ("tis", "icepop"):
        chosen = [f"rl.loss.correction.type={kind}", "rl.loss.type=decoupled_ppo"]
        assert load_config("micro", chosen).rl.loss.correction.type == kind


def test_an_interpolated_policy_shows_no_mismatch_to_reject_by():
    said = refused(
        "rl.loss.type=decoupled_ppo",
        "rl.loss.proximal=interpolated",
        "rl.loss.geometric_reject.low=0.95",
    )
    assert "rl.loss.proximal=exact" in said


@pytest.mark.parametrize("name", set(DEFAULTS) - {"decoupled_ppo"})
def test_several_steps_need_a_proximal_policy(name):
    said = refused(f"rl.loss.type={name}", "rl.updates_per_batch=2", "rl.steps=4")
    assert "rl.updates_per_batch=2" in said
    assert "rl.loss.type=decoupled_ppo" in said


def test_several_steps_divide_the_run():
    two = ["rl.loss.type=decoupled_ppo", "rl.updates_per_batch=2"]
    assert load_config("micro", [*two, "rl.steps=4"]).rl.updates_per_batch == 2
    assert "try 4" in refused(*two, "rl.steps=5")


def test_a_batch_has_a_group_for_each_of_its_steps():
    sized = ["rl.loss.type=decoupled_ppo", "rl.batch_size=12", "rl.group_size=4", "rl.steps=60"]
    assert load_config("micro", [*sized, "rl.updates_per_batch=3"]).rl.updates_per_batch == 3
    said = refused(*sized, "rl.updates_per_batch=4")
    assert "rl.updates_per_batch=4 is more than the 3 group(s)" in said and "try 3" in said


@pytest.mark.parametrize(
    "override",
    [
        "rl.loss.clip_low=1.0",
        "rl.loss.clip_low=-0.1",
        "rl.loss.clip_high=0",
        "rl.loss.dual_clip=1.0",
        "rl.loss.aggregation=mean",
        "rl.loss.geometric_reject.low=1.01",
        "rl.loss.widening.start=0",
    ],
)
def test_impossible_bounds_are_refused_by_key(override):
    assert override.split("=")[0] in refused(override)


@pytest.mark.parametrize("credit", ["grpo", "dr_grpo", "rloo", "return_to_go"])
def test_a_group_of_one_has_no_baseline(credit):
    said = refused(f"rl.credit.type={credit}", "rl.group_size=1")
    assert f"rl.credit.type={credit}" in said
    assert load_config("micro", ["rl.credit.type=turn_gae", "rl.group_size=1"]).rl.group_size == 1
