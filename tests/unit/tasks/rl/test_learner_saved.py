"""What a learner writes: its state, the merged policy, and what engines are given."""

import pytest
import torch
from learner_parts import FULL, TURNS, groups, hash_model_parts, learner_of, weights

from tasks.models.load import hash_model, load_model

__all__ = ["groups", "learner_of"]


@pytest.mark.parametrize(
    "kind",
    [{}, {"credit": TURNS}, {"trainable": FULL}, {"deepspeed": {"dtype": "bfloat16"}},
     {"deepspeed": {"dtype": "bfloat16"}, "credit": TURNS}, {"deepspeed": {"zero_stage": 2}},
     {"deepspeed": {"dtype": "bfloat16", "zero_stage": 1}},
     {"deepspeed": {"zero_stage": 3}, "credit": TURNS},
     {"deepspeed": {"zero_stage": 3}, "trainable": FULL}],
)  # fmt: skip
def test_a_saved_learner_goes_on_bit_for_bit(learner_of, groups, kind, tmp_path):
    learner = learner_of(**kind)
    for _ in range(2):
        learner.train(groups, 0.01)
    hashes = learner.save(tmp_path)
    assert {"policy", "optimiser"} <= set(hashes) == {p.stem for p in tmp_path.iterdir()}
    resumed = learner_of(**kind)
    assert resumed.load(tmp_path, 2) == hashes
    for _ in range(2):
        one, two = learner.train(groups, 0.01), resumed.train(groups, 0.01)
        assert one.learner_version == two.learner_version
        speed = {"train_tokens_per_s"}
        assert {k: v for k, v in one.metrics.items() if k not in speed} == pytest.approx(
            {k: v for k, v in two.metrics.items() if k not in speed}, rel=0, abs=0
        )
    assert weights(learner) == weights(resumed)
    learner.save(tmp_path / "one"), resumed.save(tmp_path / "two")
    assert hash_model_parts(tmp_path / "one") == hash_model_parts(tmp_path / "two")


@pytest.mark.parametrize("trainable", [None, FULL])
def test_the_saved_policy_is_the_merged_one(learner_of, groups, trainable, tmp_path):
    learner = learner_of(**({"trainable": trainable} if trainable else {}))
    learner.train(groups, 0.0)
    sha256 = learner.save_policy(tmp_path)
    assert hash_model(tmp_path / "policy") == sha256
    assert (tmp_path / "adapter" / "weights.safetensors").exists() == (trainable is None)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        trained = learner._module.model.eval()(input_ids=ids).logits
        merged = load_model(tmp_path / "policy")(input_ids=ids).logits
    torch.testing.assert_close(merged, trained, rtol=0, atol=1e-4)


def test_publishing_stamps_attempt_and_step_and_remembers_the_last_canary(
    learner_of, groups, tmp_path
):
    learner = learner_of()
    first = learner.publish(tmp_path, 4)
    learner.train(groups, 0.0)
    second = learner.publish(tmp_path, 4)
    assert (first.version, second.version) == ((4, 0), (4, 1))
    assert first.canary.previous_logprobs is None
    assert second.canary.previous_logprobs == first.canary.logprobs != second.canary.logprobs
    assert len(first.canary.sequences) == 8
    assert sum(len(s) - 1 for s in first.canary.sequences) == len(first.canary.logprobs)
    assert learner._module.training  # scoring the canary leaves training mode as it was
