"""Profiles, overrides and the faults people make in them."""

import pickle
from pathlib import Path

import pytest

from configs.load import (
    ConfigError,
    dump_config,
    find_profile,
    load_config,
    resolve_config,
)
from configs.schema import PipelineConfig
from configs.schema.rl_credit import TurnGaeCredit
from configs.schema.rl_runtimes import InlineRuntime

BASE = """profile: trial
rl:
  steps: 5
  runtime:
    type: ray
    rollout_workers: 2
  optimiser: {lr: 1e-3}
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "trial.yaml"
    path.write_text(BASE)
    return path


def problem(path: Path, *overrides: str):
    """The one problem that loading meets."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value.problems[0]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    return path


def test_file_values_lie_over_defaults(profile: Path) -> None:
    config = load_config(profile)
    assert config.rl.steps == 5
    assert config.rl.optimiser.lr == 0.001  # 1e-3 is a number here, text in YAML 1.1
    assert config.rl.runtime.rollout_workers == 2
    assert config.rl.batch_size == PipelineConfig().rl.batch_size


def test_override_wins_over_file(profile: Path) -> None:
    assert load_config(profile, ["rl.steps=20"]).rl.steps == 20
    assert load_config(profile, {"rl.steps": 21}).rl.steps == 21
    assert load_config(profile, {"rl": {"steps": 22}}).rl.steps == 22


def test_override_keeps_the_rest_of_a_default_block(profile: Path) -> None:
    optimiser = load_config(profile, ["sft.optimiser.lr=5e-4"]).sft.optimiser
    assert (optimiser.lr, optimiser.decay, optimiser.warmup_steps) == (5e-4, "linear", 20)


def test_override_inside_a_gate_keeps_the_other_gates(profile: Path) -> None:
    gates = load_config(profile, ["quantize.gates.IQ2_M.max_kld=0.6"]).quantize.gates
    assert gates["IQ2_M"].max_kld == 0.6
    assert gates["IQ2_M"].accuracy_ci_low == -0.05  # this gate's default, not the class's −0.03
    assert gates["Q8_0"].max_kld == 0.01


def test_override_opens_an_optional_block(profile: Path) -> None:
    adaptive = load_config(profile, ["rl.kl.adaptive.target_end=0.02"]).rl.kl.adaptive
    assert adaptive is not None
    assert (adaptive.target_start, adaptive.target_end) == (0.1, 0.02)


def test_flow_mapping_override(profile: Path) -> None:
    credit = load_config(profile, ["rl.credit={type: turn_gae, gamma: 0.97}"]).rl.credit
    assert credit == TurnGaeCredit(gamma=0.97)


def test_variant_change_drops_the_other_variants_keys_and_says_so(profile: Path) -> None:
    resolved = resolve_config(profile, ["rl.runtime.type=inline"])
    assert resolved.config.rl.runtime == InlineRuntime()
    (note,) = resolved.notes
    assert "rl.runtime.rollout_workers" in note
    assert f"{profile}:6" in note
    assert "rl.runtime.type=inline" in note


def test_variant_change_without_user_keys_says_nothing(profile: Path) -> None:
    assert resolve_config(profile, ["rl.credit.type=dr_grpo"]).notes == ()


def test_variant_may_be_chosen_after_its_keys(profile: Path) -> None:
    credit = load_config(profile, ["rl.credit.gamma=0.9", "rl.credit.type=turn_gae"]).rl.credit
    assert credit == TurnGaeCredit(gamma=0.9)


def test_the_last_of_two_overrides_counts_and_is_noted(profile: Path) -> None:
    resolved = resolve_config(profile, ["rl.steps=20", "rl.steps=30"])
    assert resolved.config.rl.steps == 30
    assert "rl.steps=20" in resolved.notes[0]


def test_dump_loads_back_equal(profile: Path, tmp_path: Path) -> None:
    config = load_config(profile, ["rl.credit.type=turn_gae", "rl.optimiser.lr=3.3e-7"])
    again = load_config(profile, dump_config(config))
    assert again == config


@pytest.mark.parametrize(
    ("override", "key", "parts"),
    [
        ("rl.step=20", "rl.step", ["unknown key", "did you mean rl.steps?", "batch_size"]),
        ("rll.steps=20", "rll.steps", ["unknown key", "rl.steps"]),
        ("rl.lr=1", "rl.lr", ["unknown key", "rl.optimiser.lr"]),
        ("steps=1", "steps", ["rl.steps", "sft.steps"]),
        ("rl.steps=abc", "rl.steps", ['"abc"', "whole number, at least 1"]),
        ("rl.steps=2.0", "rl.steps", ["2.0", "write 2"]),
        ("rl.steps=0", "rl.steps", ["= 0", "at least 1"]),
        ("rl.steps=-3", "rl.steps", ["-3", "at least 1"]),
        ("rl.steps=true", "rl.steps", ["true", "whole number"]),
        ("rl.steps='20'", "rl.steps", ["without quotes", "write 20"]),
        ("rl.steps=1_000", "rl.steps", ["write 1000"]),
        ("rl.steps=", "rl.steps", ["null", "whole number"]),
        ("rl.steps.foo=3", "rl.steps", ["whole number", "rl.steps.foo=3"]),
        ("rl=3", "rl", ["a block of keys"]),
        ("rl.optimiser.lr=.nan", "rl.optimiser.lr", ["NaN", "never allowed"]),
        ("rl.optimiser.lr=.inf", "rl.optimiser.lr", ["Infinity", "never allowed"]),
        ("rl.optimiser.lr=1e999", "rl.optimiser.lr", ["Infinity", "never allowed"]),
        ("rl.steps=.inf", "rl.steps", ["whole number", "never allowed"]),
        ("rl.optimiser.lr=nan", "rl.optimiser.lr", ['"nan"', "a number, above 0"]),
        ("rl.optimiser.lr=1,5", "rl.optimiser.lr", ["write 1.5"]),
        ("rl.buffer.order=lifo", "rl.buffer.order", ["one of freshest, fifo"]),
        ("rl.deepspeed.zero_stage=5", "rl.deepspeed.zero_stage", ["one of 0, 1, 2"]),
        ("evaluation.gate.stop_on_failure=no", "evaluation.gate.stop_on_failure",
         ['"no"', "true or false", "write false"]),
        ("evaluation.gate.stop_on_failure=1", "evaluation.gate.stop_on_failure",
         ["true or false"]),
        ("rl.steps=012", "rl.steps", ["012", "leading zero", "write 12"]),
        ("package.l4t_min=36.10", "package.l4t_min", ["text", "quotes"]),
        ("package.name=Bad Name", "package.name", ["matching", '"Bad Name"']),
        ("tools=calc", "tools", ["a list of texts", "[calc]"]),
        ("quantize.types=[Q8_0, Q9]", "quantize.types", ["item 2", "Q5_K_M", '"Q9"']),
        ("quantize.types=[]", "quantize.types", ["1 or more"]),
        ("quantize.gates.IQ9.max_kld=1", "quantize.gates.IQ9", ["Q4_K_M", "IQ2_M"]),
        ("rl.optimiser.betas=[0.9]", "rl.optimiser.betas", ["2 numbers"]),
        ("rl.runtime.type=inlin", "rl.runtime.type", ["inline, ray", "did you mean inline?"]),
        ("rl.runtime.type=3", "rl.runtime.type", ["inline, ray"]),
        ("rl.runtime=null", "rl.runtime", ["inline, ray"]),
        ("rl.credit.gamma=0.9", "rl.credit.gamma", ["rl.credit.type=turn_gae", "grpo"]),
        ("data.source.type=file", "data.source.train", ["required", "text"]),
        ("system_prompt=You are: kind", "system_prompt", ["quotes"]),
        ("system_prompt=count # this", "system_prompt", ["'count'", "quotes"]),
        ("system_prompt=[open", "system_prompt", ["quotes"]),
        ("rl.credit={type: grpo, type: turn_gae}", "rl.credit", ["twice"]),
        ("rl.steps=!!int 3", "rl.steps", ["tag"]),
        ("rl.steps=!!python/object:os.system x", "rl.steps", ["tag"]),
    ],
)  # fmt: skip
def test_a_bad_override_names_key_value_and_choice(
    profile: Path, override: str, key: str, parts: list[str]
) -> None:
    found = problem(profile, override)
    assert found.key == key
    assert override in found.origin
    for part in parts:
        assert part in str(found), str(found)


@pytest.mark.parametrize("text", ["rl.steps", "=3", "rl..steps=3", ".rl=3", ""])
def test_what_is_no_override_is_shown_how_to_write_one(profile: Path, text: str) -> None:
    assert "rl.steps=20" in problem(profile, text).expected


def test_dashes_before_an_override_are_forgiven(profile: Path) -> None:
    assert load_config(profile, ["--rl.steps=7"]).rl.steps == 7


def test_paths_in_errors_have_no_union_tags(profile: Path) -> None:
    found = problem(profile, "data.source.type=file", "data.source.train=3")
    assert found.key == "data.source.train"
    found = problem(profile, "rl.credit.type=turn_gae", "rl.credit.gama=0.9")
    assert found.key == "rl.credit.gama"
    assert "did you mean rl.credit.gamma?" in found.suggestion


def test_leaf_unions_give_one_problem(profile: Path) -> None:
    found = problem(profile, "data.source.type=reasoning_gym", "data.source.options={digits: [1]}")
    assert found.key == "data.source.options.digits"
    assert "a whole number or a number or text or true or false" in found.expected


def test_a_key_of_the_variant_left_is_refused(profile: Path) -> None:
    found = problem(profile, "rl.runtime.type=inline", "rl.runtime.rollout_workers=3")
    assert found.key == "rl.runtime.rollout_workers"
    assert "rl.runtime.type=ray" in found.suggestion
    assert "rl.runtime.type is inline" in found.suggestion


def test_rules_across_keys_name_both_keys_and_where_they_stand(profile: Path) -> None:
    found = problem(profile, "rl.batch_size=12")
    assert found.key == "rl.batch_size"
    assert "rl.group_size=8" in found.expected
    assert "command line: rl.batch_size=12" in found.origin
    assert "rl.group_size: default" in found.origin


def test_every_fault_is_listed_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "profile: x\nrl:\n  steps: many\n  sed: 3\nsft:\n  steps: -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    found = {p.key: p.origin for p in caught.value.problems}
    assert found == {
        "rl.steps": f"{path}:3",
        "rl.sed": f"{path}:4",
        "sft.steps": f"{path}:6",
    }
    assert "3 problems" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts", "line"),
    [
        ("", ["empty"], 0),
        ("# nothing\n", ["empty"], 0),
        ("- a\n- b\n", ["list"], 0),
        ("just text\n", ["str"], 0),
        ("profile: a\nprofile: b\n", ["profile", "twice", "line 1"], 2),
        ("profile: a\nrl:\n  steps: 1\n  steps: 2\n", ["rl.steps", "twice", "line 3"], 4),
        ("profile: a\nrl: {steps: 1\n", ["expected"], 3),
        ("profile: a\n\trl: 1\n", ["cannot start any token"], 2),
        ("profile: a\n---\nprofile: b\n", ["single document"], 2),
        ("profile: a\nrl: !!python/object:os.system {}\n", ["tag"], 2),
        ("profile: a\nrl: &r\n  kl: *r\n", ["alias"], 2),
        ("profile: a\n3: b\n", ["a key must be text", "3"], 2),
        ("profile: a\nrl:\n  <<: {steps: 1}\n", ["merge keys"], 3),
        ("profile: a\nrl:\n  steps: 08\n", ["leading zero", "write 8"], 3),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, text: str, parts: list[str], line: int) -> None:
    path = write(tmp_path, text)
    found = problem(path)
    assert found.origin == (f"{path}:{line}" if line else str(path))
    for part in parts:
        assert part in found.expected, found.expected


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"profile: caf\xe9\n")
    assert "not UTF-8 at byte 12" in problem(path).expected


def test_byte_order_mark_and_unicode_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes("\ufeffprofile: a\nsystem_prompt: Rechne über 7 · 8\n".encode())
    assert load_config(path).system_prompt == "Rechne über 7 · 8"


@pytest.mark.parametrize(
    ("typed", "value"),
    [("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2026-01-02", "2026-01-02"), ("null", None),
     ("'012'", "012"), ("~", None), ("yes", "yes"), ("=", "="), ("''", "")],
)  # fmt: skip
def test_yaml_1_1_traps_stay_text(profile: Path, typed: str, value: str | None) -> None:
    assert load_config(profile, [f"system_prompt={typed}"]).system_prompt == value


@pytest.mark.parametrize(
    ("typed", "value"), [("1e-3", 1e-3), ("5E-06", 5e-6), (".5", 0.5), ("1.", 1.0), ("+2", 2.0)]
)
def test_numbers_as_people_write_them(profile: Path, typed: str, value: float) -> None:
    assert load_config(profile, [f"rl.optimiser.lr={typed}"]).rl.optimiser.lr == value


def test_aliases_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "profile: a\nsft: {seed: &s 7}\nrl: {seed: *s}\n")
    assert load_config(path).rl.seed == 7


def test_alias_bombs_are_refused(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "aliases written out" in problem(write(tmp_path, "\n".join(levels))).expected


def test_profile_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or profile"):
        find_profile("calculater")
    with pytest.raises(ConfigError, match="a folder"):
        find_profile(tmp_path)


def test_a_value_that_is_no_data_is_refused(profile: Path) -> None:
    with pytest.raises(ConfigError, match="not plain data"):
        load_config(profile, {"rl.steps": object()})


def test_text_that_is_not_unicode_is_refused(profile: Path) -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(profile, ["system_prompt=\udcff"])


def test_the_error_survives_pickling(profile: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(profile, ["rl.step=1"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.problems == caught.value.problems
