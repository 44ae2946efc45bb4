"""Files that build on others: what lies over what, and what cannot be built on."""

from pathlib import Path

import pytest

from configs.layers import bases
from configs.load import ConfigError, dump_config, load_config, profiles, resolve_config

FILE = """profile: trial
extends: calculator
rl:
  steps: 7
presets:
  small: {rl: {batch_size: 16}, sft: {steps: 3}}
  large:
    rl: {batch_size: 256, steps: 9}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "trial.yaml"
    file.write_text(FILE)
    return file


def problem(path: Path, *overrides: str):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


def test_what_the_file_sets_lies_over_what_it_extends(path: Path) -> None:
    config = load_config(path)
    assert (config.profile, config.rl.steps, config.hardware) == ("trial", 7, None)
    calculator = load_config("calculator")
    assert config.rl.kl == calculator.rl.kl and config.sft == calculator.sft


def test_a_preset_lies_over_its_file_and_an_override_over_both(path: Path) -> None:
    large = load_config(path, ["hardware=large"])
    assert (large.rl.batch_size, large.rl.steps, large.hardware) == (256, 9, "large")
    assert load_config(path, ["rl.steps=5", "hardware=large"]).rl.steps == 5
    small = load_config(path, {"hardware": "small"})
    assert (small.rl.batch_size, small.rl.steps, small.sft.steps) == (16, 7, 3)


def test_the_last_choice_counts(path: Path) -> None:
    assert load_config(path, ["hardware=large", "hardware=small"]).rl.batch_size == 16


def test_a_file_may_choose_for_itself_and_the_command_line_choose_otherwise(path: Path) -> None:
    path.write_text(FILE + "hardware: large\n")
    assert load_config(path).rl.batch_size == 256
    assert load_config(path, ["hardware=small"]).rl.batch_size == 16


def test_origins_name_the_line_in_the_file_that_set_a_value(path: Path) -> None:
    places = resolve_config(path, ["hardware=large"]).places
    assert places["rl.batch_size"] == f"{path}:8"
    assert places["rl.kl.coefficient"].startswith(str(profiles()["calculator"]))
    assert not [key for key in places if key.startswith("presets")]


def test_a_mistake_in_a_preset_is_found_there(path: Path) -> None:
    path.write_text(FILE.replace("batch_size: 256", "batch_siz: 256"))
    found = problem(path, "hardware=large")
    assert found.key == "rl.batch_siz" and found.origin == f"{path}:8"


def test_unknown_presets_and_bases_are_named_with_what_there_is(path: Path) -> None:
    found = problem(path, "hardware=huge")
    assert (found.key, found.value) == ("hardware", "huge")
    assert "large, small" in found.expected and found.origin == "command line: hardware=huge"
    assert "large, small" in problem(path, "hardware=[4]").expected
    path.write_text("profile: trial\nextends: calculater\n")
    found = problem(path)
    assert found.key == "extends" and "calculator" in found.expected
    assert found.origin == f"{path}:2"
    path.write_text("profile: trial\nextends: [calculator]\n")
    assert problem(path).key == "extends"


def test_a_profile_without_presets_has_no_hardware_to_choose(path: Path) -> None:
    found = problem(profiles()["micro"], "hardware=4gpu")
    assert found.key == "hardware" and "has no presets" in found.expected


def test_what_was_chosen_may_stand_in_a_file_without_presets(path: Path, tmp_path: Path) -> None:
    """A dumped config says which preset it came from, and loads again."""
    chosen = load_config(path, ["hardware=large"])
    again = tmp_path / "again.yaml"
    again.write_text(str(dump_config(chosen)).replace("None", "null").replace("'", '"')
                     .replace("True", "true").replace("False", "false"))  # fmt: skip
    assert load_config(again) == chosen


def test_nothing_extends_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = tmp_path / "ring.yaml"
    ring.write_text("extends: ring\nprofile: ring\n")
    monkeypatch.setattr("configs.load.bases", lambda: {"ring": ring})
    found = problem(ring)
    assert found.key == "extends" and "extends this one" in found.expected


def test_a_base_is_no_profile() -> None:
    assert "gsm8k_gpu" in bases() and not set(bases()) & set(profiles())
