"""Every GPU profile on every kind of hardware: it loads, keeps the rules, and fits its cards."""

import json

import pytest

from configs.load import dump_config, load_config
from configs.schema import PipelineConfig
from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.rl_runtimes import RayRuntime
from configs.schema.training import Lora
from tasks.models.shapes import shape_of
from tasks.rl.memory import cards, fit

SIZES = {"qwen2.5": ("0.5b", "1.5b", "3b", "7b"), "qwen3": ("0.6b", "1.7b", "4b", "8b")}
PROFILES = [f"gsm8k_{family}_{size}" for family, sizes in SIZES.items() for size in sizes]
HARDWARE = {"1gpu": 1, "2gpu": 2, "4gpu": 4, "8gpu": 8, "multinode": 16}


@pytest.mark.parametrize("hardware", sorted(HARDWARE))
@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_fits_the_hardware_it_asks_for(profile: str, hardware: str) -> None:
    config = load_config(profile, [f"hardware={hardware}"])
    assert (config.profile, config.hardware) == (profile, hardware)
    assert PipelineConfig.model_validate_json(json.dumps(dump_config(config))) == config
    placed = cards(config)
    assert len(placed) == HARDWARE[hardware]
    shape = shape_of(config.model)
    for card in set(placed):
        verdict = fit(shape, config, card, config.requires.gpu_memory_gib)
        assert verdict.fits, f"{card.roles}: {verdict.detail}; {verdict.remedy}"


@pytest.mark.parametrize("profile", PROFILES)
def test_one_shape_of_config_and_the_settings_of_large_models(profile: str) -> None:
    config = load_config(profile)
    size = profile.rpartition("_")[2]
    assert config.model.path.lower().removesuffix("-instruct").endswith(f"-{size}")
    for lora in (config.rl.trainable, config.sft.trainable):
        assert isinstance(lora, Lora)
        assert 16 <= lora.r <= 32 and lora.alpha == 32 and lora.targets == ("q_proj", "v_proj")
    assert 5e-6 <= config.rl.optimiser.lr <= 1e-5
    assert isinstance(config.rl.engine, VllmEngineConfig)
    assert config.rl.deepspeed.micro_batch_tokens >= config.model.max_length
    assert config.evaluation.sampling.max_new_tokens == config.rl.sampling.max_new_tokens
    assert config.rl.sampling.max_new_tokens < config.model.max_length


@pytest.mark.parametrize("hardware", ["4gpu", "8gpu", "multinode"])
def test_work_divides_among_ranks(hardware: str) -> None:
    rl = load_config("gsm8k_qwen3_4b", [f"hardware={hardware}"]).rl
    assert isinstance(rl.runtime, RayRuntime)
    assert rl.batch_size // rl.group_size % rl.runtime.learner_ranks == 0
    assert rl.batch_size // rl.group_size % rl.runtime.rollout_workers == 0


def test_all_weights_of_the_smallest_fit_a_large_card() -> None:
    full = ["hardware=2gpu", "rl.trainable.type=full", "sft.trainable.type=full"]
    config = load_config("gsm8k_qwen2.5_0.5b", full)
    verdicts = [fit(shape_of(config.model), config, card, 40.0) for card in cards(config)]
    assert all(verdict.fits for verdict in verdicts)
