"""The list of keys that `rl-pipeline config` shows."""

import pytest

from configs.keys import REQUIRED, all_keys, describe, nearest_keys


def by_name(path: str = "") -> dict[str, object]:
    return {key.dotted: key for key in describe(path)}


def test_a_key_has_type_default_and_docstring() -> None:
    steps = by_name("rl")["rl.steps"]
    assert steps.type == "a whole number, at least 1"
    assert steps.default == 200
    assert steps.doc == "Optimiser steps."


def test_defaults_are_those_of_the_place_not_of_the_class() -> None:
    assert by_name("sft.optimiser")["sft.optimiser.lr"].default == 1e-3
    assert by_name("rl.optimiser")["rl.optimiser.lr"].default == 1e-5


def test_union_keys_say_when_they_apply() -> None:
    keys = by_name("rl.credit")
    assert keys["rl.credit.type"].type == "one of grpo, dr_grpo, rloo, return_to_go, turn_gae"
    assert keys["rl.credit.gamma"].when == "rl.credit.type=turn_gae"
    train = [k for k in all_keys() if k.dotted == "data.source.train"]
    assert [k.default for k in train] == [REQUIRED]


def test_optional_keys_say_null_last() -> None:
    assert by_name("data.source")["data.source.max_train_rows"].type == (
        "a whole number, at least 1, or null"
    )


def test_gates_are_listed_one_by_one() -> None:
    assert by_name("quantize.gates")["quantize.gates.Q8_0.max_kld"].default == 0.01


def test_unknown_path_suggests() -> None:
    with pytest.raises(KeyError, match=r"did you mean rl\.steps"):
        describe("rl.step")


def test_every_leaf_is_documented_in_words_a_person_reads() -> None:
    for key in all_keys():
        assert "class '" not in key.type and "typing" not in key.type, key


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("rl.step", "rl.steps"), ("rl.lr", "rl.optimiser.lr"), ("quantise.types", "quantize.types"),
     ("zzz", None)],
)  # fmt: skip
def test_nearest_keys(typed: str, meant: str | None) -> None:
    found = nearest_keys(typed, [key.dotted for key in all_keys()])
    assert (found[0] if found else None) == meant
