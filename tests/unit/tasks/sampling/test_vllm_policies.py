"""The shelf of policies: fresh names, old ones kept while they are used, adapters checked whole."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema.training import Lora
from tasks.artifacts import hash_tensors
from tasks.models.errors import WeightsMismatchError
from tasks.models.trainable import attach, trainable_tensors
from tasks.sampling.errors import AnswerRefusedError
from tasks.sampling.types import PolicyVersion
from tasks.sampling.vllm_policies import (
    HeldPolicy,
    PolicyGoneError,
    Shelf,
    check_adapter,
    policy_name,
    write_adapter,
)

LORA = Lora(r=4, alpha=8, targets=("q_proj", "down_proj"))


def held(step: int) -> HeldPolicy:
    return HeldPolicy(PolicyVersion(0, step), f"policy-{step}", step)


def steps(shelf: Shelf) -> list[int]:
    return [version.step for version in shelf.versions]


def test_names_are_fresh_for_attempt_step_and_weights():
    assert policy_name(PolicyVersion(2, 31), "0123456789ab") == "policy-2-31-01234567"


def test_the_newest_are_kept_and_older_ones_while_they_are_used():
    shelf = Shelf(held(0), keep=2)
    oldest = shelf.take(None)
    for step in (1, 2, 3):
        shelf.put(held(step))
    assert [p.version.step for p in shelf.retire()] == [1] and steps(shelf) == [0, 2, 3]
    assert shelf.newest.version.step == 3 and shelf.take(None).version.step == 3
    assert shelf.take(PolicyVersion(0, 0)) is oldest and oldest.users == 2
    shelf.give_back(oldest)
    assert shelf.retire() == []
    shelf.give_back(oldest)
    assert shelf.retire() == [oldest] and steps(shelf) == [2, 3]
    assert shelf.retire() == []


def test_a_version_that_went_is_named():
    shelf = Shelf(held(0), keep=1)
    shelf.put(held(1))
    shelf.retire()
    with pytest.raises(PolicyGoneError, match=r"\(0, 0\) is asked for, held are \[\(0, 1\)\]") as e:
        shelf.take(PolicyVersion(0, 0))
    assert isinstance(e.value, AnswerRefusedError)  # counted and left out, not the end of a run


def test_published_again_the_later_one_answers():
    shelf = Shelf(held(1), keep=3)
    again = held(1)
    shelf.put(again)
    assert shelf.take(PolicyVersion(0, 1)) is again


@pytest.fixture
def weights(tiny_model, tmp_path):
    """A published adapter of the tiny model (one layer, two targets: four tensors)."""
    tensors = trainable_tensors(attach(tiny_model(), LORA, 0))
    assert len(tensors) == 4
    path = tmp_path / "0-1-abc" / "weights.safetensors"
    path.parent.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    return path


def test_the_folder_is_what_peft_reads(weights, tiny_model):
    from peft import PeftModel

    folder, sha256 = write_adapter(weights, LORA, layers=1)
    assert sha256 == hash_tensors(load_file(weights)) and folder.parent == weights.parent
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    loaded = PeftModel.from_pretrained(tiny_model(), folder)
    assert hash_tensors(trainable_tensors(loaded)) == sha256


def test_a_half_written_folder_is_written_anew(weights):
    folder = weights.parent / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"torn")
    write_adapter(weights, LORA, layers=1)
    assert hash_tensors(load_file(folder / "adapter_model.safetensors")) == hash_tensors(
        load_file(weights)
    )
    before = (folder / "adapter_config.json").stat().st_mtime_ns
    write_adapter(weights, LORA, layers=1)  # another worker of the same machine
    assert (folder / "adapter_config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("lora", "layers", "says"),
    [
        (Lora(r=8, alpha=8, targets=("q_proj", "down_proj")), 1, r"rank 4, rl\.trainable\.r=8"),
        (Lora(r=4, alpha=8, targets=("q_proj",)), 1, "belongs to no adapter"),
        (Lora(r=4, alpha=8, targets=("q_proj", "down_proj", "up_proj")), 1, "4 tensors.* make 6"),
        (LORA, 2, "4 tensors; 2 layers .* make 8"),
    ],
)
def test_another_adapter_is_refused(weights, lora, layers, says):
    with pytest.raises(WeightsMismatchError, match=says):
        write_adapter(weights, lora, layers)
    assert not (weights.parent / "adapter").exists()


def test_full_weights_are_no_adapter():
    with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight belongs to no adapter"):
        check_adapter({"model.norm.weight": torch.ones(4)}, LORA, 1)


@pytest.mark.parametrize("shape", [(), (4,), (4, 32, 1)])
def test_what_is_no_matrix_is_refused(weights, shape):
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    save_file(tensors | {name: torch.ones(shape)}, weights)
    with pytest.raises(WeightsMismatchError, match=f"{name} has shape .*: rank of no matrix"):
        write_adapter(weights, LORA, layers=1)


@pytest.mark.parametrize("left", [0, 7, 100])
def test_a_publish_that_is_cut_off_is_refused(weights, left):
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(WeightsMismatchError, match="is not a whole safetensors file"):
        write_adapter(weights, LORA, layers=1)
    assert not (weights.parent / "adapter").exists()
