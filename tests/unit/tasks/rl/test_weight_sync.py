"""A publish that did not arrive is caught twice over: by the hash, and by what the engine says."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.artifacts import hash_tensors
from tasks.models.errors import WeightsMismatchError
from tasks.models.trainable import load_trainable, trainable_tensors
from tasks.rl.errors import SyncProofError
from tasks.rl.learner import Learner
from tasks.rl.rollout_worker import RolloutWorker
from tasks.rl.weight_sync import MARKER, WEIGHTS, Canary, Receipt, prove, publish
from tasks.sampling.types import PolicyVersion
from tests.tiny_publish import Pair, pair

__all__ = ["pair"]

SETTINGS = [(lr, dtype) for lr in (1e-5, 1e-4, 1e-3) for dtype in ("float32", "bfloat16")]


def said_by(worker: RolloutWorker, receipt: Receipt):
    return worker._engine.score(receipt.canary.sequences, temperature=1.0)


@pytest.mark.parametrize(("lr", "dtype"), SETTINGS)
def test_healthy_publishes_raise_no_false_alarm(pair, lr, dtype):
    both = pair(lr, dtype)
    for step in range(17):  # six settings: 102 publishes
        receipt = both.publish()
        proof = both.sync(receipt)
        assert proof.version == receipt.version == PolicyVersion(0, step)
        if proof.previous_distance is not None:
            assert proof.distance < proof.previous_distance
        both.step()


@pytest.mark.parametrize(("lr", "dtype"), SETTINGS)
def test_a_withheld_publish_is_caught_by_hash_and_by_canary(pair, lr, dtype):
    both = pair(lr, dtype)
    both.sync(both.publish())
    both.step()
    receipt = both.publish()
    held = hash_tensors(trainable_tensors(both.worker._engine.model))
    with pytest.raises(SyncProofError, match=r"publish 0/1: the engine holds weights"):
        prove(receipt, held, said_by(both.worker, receipt))
    canary = receipt.canary
    if dtype == "bfloat16" and canary.logprobs == canary.previous_logprobs:
        assert lr < 1e-3  # below what bfloat16 activations resolve: the hash alone sees it
        return
    with pytest.raises(SyncProofError, match="did not take effect"):
        prove(receipt, receipt.sha256, said_by(both.worker, receipt))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_tensor_withheld_is_caught_by_the_hash(pair, dtype):
    both = pair(1e-3, dtype)
    both.sync(both.publish())
    both.step()
    receipt = both.publish()
    weights = load_file(receipt.weights)
    first = sorted(weights)[0]
    weights[first] = trainable_tensors(both.worker._engine.model)[first].contiguous()
    save_file(weights, receipt.weights)
    with pytest.raises(SyncProofError, match="the engine holds weights"):
        both.sync(receipt)


@pytest.mark.parametrize("lr", [1e-5, 1e-3])
def test_the_adapter_of_another_run_is_caught_by_hash_and_by_canary(pair, lr):
    both = pair(lr, "float32")
    both.sync(both.publish())
    both.step()
    receipt = both.publish()
    # Another run's step of the same size. One that happens to point the same way is nearer to the
    # new weights than the old ones are, and only its hash gives it away; this one points back.
    held = trainable_tensors(both.worker._engine.model)
    swapped = {n: 2 * held[n] - t for n, t in load_file(receipt.weights).items()}
    load_trainable(both.worker._engine.model, swapped)
    scores = said_by(both.worker, receipt)
    with pytest.raises(SyncProofError, match="the engine holds weights"):
        prove(receipt, hash_tensors(swapped), scores)
    with pytest.raises(SyncProofError, match="did not take effect"):
        prove(receipt, receipt.sha256, scores)


def test_far_off_weights_are_caught_even_if_the_new_version_is_nearer(pair):
    both = pair(1e-3, "float32")
    both.sync(both.publish())
    both.step()
    receipt = both.publish()
    beyond = {n: 60 * t for n, t in load_file(receipt.weights).items()}
    load_trainable(both.worker._engine.model, beyond)
    with pytest.raises(SyncProofError, match="nats off"):
        prove(receipt, receipt.sha256, said_by(both.worker, receipt))


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_truncated_file_never_reaches_the_engine(pair, size):
    both = pair(1e-3, "float32")
    both.sync(both.publish())
    before = hash_tensors(trainable_tensors(both.worker._engine.model))
    both.step()
    receipt = both.publish()
    receipt.weights.write_bytes(receipt.weights.read_bytes()[:size])
    with pytest.raises(WeightsMismatchError, match="not a whole safetensors file"):
        both.sync(receipt)
    assert hash_tensors(trainable_tensors(both.worker._engine.model)) == before


RECEIPT = Receipt(None, PolicyVersion(3, 7), "a" * 64, Canary(((1, 2, 3),), (-1.0, -2.0)))


def moved(previous) -> Receipt:
    return replace(RECEIPT, canary=Canary(((1, 2, 3),), (-1.0, -2.0), previous))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_prove_nothing(bad):
    with pytest.raises(SyncProofError, match=r"publish 3/7.*finite"):
        prove(RECEIPT, "a" * 64, [(-1.0, bad)])


@pytest.mark.parametrize("scores", [[], [()], [(-1.0,)], [(-1.0, -2.0, -3.0)]])
def test_too_few_or_too_many_scores_prove_nothing(scores):
    with pytest.raises(SyncProofError, match="2 finite ones were expected"):
        prove(RECEIPT, "a" * 64, scores)


def test_distances_by_hand():
    # Off by (.03, .04): rms √((.0009 + .0016)/2) = .03536; to the version before, off by (.1, .1).
    proof = prove(moved((-0.87, -1.86)), "a" * 64, [(-0.97,), (-1.96,)])
    assert proof.distance == pytest.approx(0.035355, abs=1e-5)
    assert proof.previous_distance == pytest.approx(0.1)
    with pytest.raises(SyncProofError, match="did not take effect"):
        prove(moved((-0.97, -1.96)), "a" * 64, [(-0.97, -1.96)])


def test_a_tie_is_no_proof():
    with pytest.raises(SyncProofError, match="did not take effect"):
        prove(moved((-1.02, -2.0)), "a" * 64, [(-1.01, -2.0)])


def test_the_first_publish_needs_scores_within_the_tolerance():
    assert prove(RECEIPT, "a" * 64, [(-1.0, -2.0)]).distance == 0
    with pytest.raises(SyncProofError, match="do not compute the same model"):
        prove(RECEIPT, "a" * 64, [(-1.0, -2.1)])
    assert prove(moved((-1.0, -2.0)), "a" * 64, [(-1.0, -2.0)]).previous_distance is None


@pytest.mark.parametrize("keep", [2, 4])
def test_the_newest_publishes_are_kept_across_attempts(tmp_path, keep):
    versions = [PolicyVersion(0, s) for s in (8, 9, 10)]
    versions += [PolicyVersion(1, s) for s in (8, 9, 10, 11)]
    for version in versions:
        receipt = publish(
            tmp_path, version, {"w": torch.tensor([float(version.step)])}, RECEIPT.canary, keep
        )
        assert receipt.weights.exists()
        marker = json.loads((receipt.folder / MARKER).read_text())
        assert (marker["attempt"], marker["step"], marker["sha256"]) == (*version, receipt.sha256)
    kept = [json.loads(p.read_text()) for p in tmp_path.glob(f"*/{MARKER}")]
    assert sorted((m["attempt"], m["step"]) for m in kept) == versions[-keep:]
    assert len(list(tmp_path.glob(f"*/{WEIGHTS}"))) == keep


def test_the_learner_keeps_as_many_as_samplers_may_hold(
    tiny_config, tiny_snapshot, tiny_data, tmp_path
):
    config = tiny_config(rl={"staleness_limit": 3})
    learner = Learner(config, tiny_snapshot.folder, tiny_snapshot.sha256, tiny_data.rows)
    both = Pair(learner, None, tmp_path, 1e-3)
    for _ in range(8):
        both.publish()
        both.step()
    assert len(list(tmp_path.iterdir())) == 3 + 2


@pytest.mark.parametrize(
    "marker", [None, "", "{", "[]", "null", '{"attempt": 0}', '{"attempt": "x", "step": 1}']
)
def test_a_publish_that_was_never_finished_is_removed_and_counts_for_nothing(tmp_path, marker):
    def folder_of(step: int):
        canary = Canary(((1, 2),), (-1.0,))
        version = PolicyVersion(0, step)
        return publish(tmp_path, version, {"w": torch.ones(2) * step}, canary, 2).folder

    first, second = folder_of(1), folder_of(2)
    (first / MARKER).unlink()
    if marker is not None:
        (first / MARKER).write_text(marker)
    (tmp_path / ".seen-1").write_bytes(b"")  # a file beside the publishes is none of them
    third = folder_of(3)
    assert {p for p in tmp_path.iterdir() if p.is_dir()} == {second, third}
    assert (tmp_path / ".seen-1").exists()


@pytest.mark.parametrize(
    ("own", "previous", "said"),
    [
        ((math.nan, -1.0), None, "1 of the learner's own 2 canary scores are finite"),
        ((-math.inf, -1.0), None, "1 of the learner's own 2"),
        ((), None, "0 of the learner's own 0 .* at least one"),
        ((-1.0, -1.0), (math.nan, -1.0), "before are 2, 1 of them finite; expected 2"),
        ((-1.0, -1.0), (math.inf, -1.0), "before are 2, 1 of them finite"),
        ((-1.0, -1.0), (-1.0,), "before are 1, 1 of them finite; expected 2"),
    ],
)
def test_a_canary_that_nothing_could_fail_against_proves_nothing(tmp_path, own, previous, said):
    sent = Receipt(tmp_path, PolicyVersion(0, 3), "a", Canary(((1, 2, 3),), own, previous))
    scores = [[-1.0] * len(own)]
    with pytest.raises(SyncProofError, match=f"publish 0/3: .*{said}"):
        prove(sent, "a", scores)


def test_what_is_published_is_what_the_hash_says(tmp_path):
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, 2, dtype=torch.bfloat16).t()}
    receipt = publish(tmp_path, PolicyVersion(0, 1), tensors, RECEIPT.canary, 2)
    assert hash_tensors(load_file(receipt.weights)) == receipt.sha256 == hash_tensors(tensors)
    assert receipt.folder.name == f"0-1-{receipt.sha256[:8]}"
