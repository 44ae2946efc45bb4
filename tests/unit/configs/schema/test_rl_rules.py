"""Settings that would fail, or do nothing, only once a run is under way are refused before it."""

import pytest
import torch

from configs.load import ConfigError, load_config


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("micro", overrides)
    return str(caught.value)


@pytest.mark.parametrize("stage", ["rl", "sft"])
@pytest.mark.parametrize("betas", ["[2,3]", "[-0.1,0.9]", "[0.9,1.0]", "[1,0.9]"])
def test_decays_adamw_would_refuse(stage, betas):
    said = refused(f"{stage}.optimiser.betas={betas}")
    assert f"{stage}.optimiser.betas" in said and "at least 0 and below 1" in said


def test_the_widest_decays_pass():
    betas = load_config("micro", ["rl.optimiser.betas=[0.0,0.9999]"]).rl.optimiser.betas
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)], betas=betas)


def test_the_coefficient_of_kl_has_room_to_move():
    key = "rl.kl.adaptive"
    said = refused(f"{key}.min_coefficient=0.5", f"{key}.max_coefficient=0.1")
    assert f"{key}.min_coefficient=0.5 is above {key}.max_coefficient=0.1" in said
    equal = [f"{key}.min_coefficient=0.1", f"{key}.max_coefficient=0.1"]
    assert load_config("micro", equal).rl.kl.adaptive.min_coefficient == 0.1


@pytest.mark.parametrize("end", ["start", "end"])
def test_form_is_never_punished(end):
    said = refused(f"rl.reward.format.{end}=-0.01")
    assert "rl.reward.format=" in said and "below 0" in said
    assert load_config("micro", ["rl.reward.format={start: 0.0, end: 0.0}"]).rl.reward.outcome == 1


@pytest.mark.parametrize("temperature", ["1e-30", "0.0", "-1", "0.009"])
@pytest.mark.parametrize("end", ["start", "end"])
def test_a_temperature_float32_cannot_divide_by(temperature, end):
    said = refused(f"rl.sampling.temperature.{end}={temperature}")
    assert "rl.sampling.temperature=" in said and "must stay at 0.01 or above" in said
    assert load_config("micro", ["rl.sampling.temperature.end=0.01"]).rl.sampling.max_turns


def test_a_filter_for_contrast_needs_groups():
    lone = ["rl.group_size=1", "rl.credit.type=turn_gae"]
    said = refused(*lone, "rl.filter=zero_variance")
    assert "rl.filter=zero_variance with rl.group_size=1" in said and "rl.filter=none" in said
    assert load_config("micro", lone).rl.filter == "none"


@pytest.mark.parametrize(
    "key", ["seed", "rl.seed", "sft.seed", "data.seed", "evaluation.sampling.seed"]
)
def test_a_seed_is_one_every_generator_takes(key):
    for seed in (-1, 2**63, 10**20):
        assert f"{key} = {seed}" in refused(f"{key}={seed}")
    assert load_config("micro", [f"{key}={2**63 - 1}"])
    torch.manual_seed(2**63 - 1)


@pytest.mark.parametrize(("hidden", "heads"), [(36, 4), (42, 2)])
def test_a_head_has_pairs_to_turn(hidden, heads):
    said = refused(f"model.hidden_size={hidden}", f"model.heads={heads}", "model.kv_heads=2")
    assert "model.heads" in said and f"odd head size of {hidden // heads}" in said
