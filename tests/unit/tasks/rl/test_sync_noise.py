"""The canary of an engine with kernels of its own: noise raises no alarm, old weights still do."""

import random

import pytest

from tasks.rl.errors import SyncProofError
from tasks.rl.weight_sync import Canary, Receipt, prove
from tasks.sampling.types import PolicyVersion

TOKENS = 400
NOISE = 0.08
SHA = "a" * 64


def receipt(moved: float, rng: random.Random) -> Receipt:
    """A publish whose every logprob moved by about `moved` nats."""
    new = [-5 * rng.random() for _ in range(TOKENS)]
    old = [x + rng.gauss(0, moved) for x in new]
    return Receipt(None, PolicyVersion(0, 1), SHA, Canary(((1,),), tuple(new), tuple(old)))


def noisy(logprobs, rng: random.Random, noise: float = NOISE) -> list[list[float]]:
    return [[x + rng.gauss(0, noise) for x in logprobs]]


@pytest.mark.parametrize("moved", [1e-5, 1e-3, 0.02, 0.2])
def test_500_healthy_publishes_raise_no_alarm(moved):
    rng = random.Random(1)
    for _ in range(500):
        sent = receipt(moved, rng)
        assert prove(sent, SHA, noisy(sent.canary.logprobs, rng), NOISE).distance < 3 * NOISE


def test_without_room_for_noise_half_of_them_would():
    """What the room is for: nearer to the new weights is a coin toss where noise is larger."""
    rng = random.Random(1)
    alarms = 0
    for _ in range(200):
        sent = receipt(1e-4, rng)
        try:
            prove(sent, SHA, noisy(sent.canary.logprobs, rng, 0.03))
        except SyncProofError:
            alarms += 1
    assert 70 < alarms < 130


def test_a_withheld_publish_is_seen_where_it_can_be():
    """Old weights lie half the way, 0.5 x moved x 20, off the middle: above 5 x noise it shows."""
    rng = random.Random(2)
    for moved in (0.03, 0.045):
        sent = receipt(moved, rng)
        with pytest.raises(SyncProofError, match="did not take effect"):
            prove(sent, SHA, noisy(sent.canary.previous_logprobs, rng, 0.02), 0.02)
    with pytest.raises(SyncProofError, match="the engine holds weights"):  # and always by the hash
        prove(receipt(1e-5, rng), "b" * 64, [[0.0] * TOKENS], NOISE)


def test_another_model_is_seen_through_any_noise():
    rng = random.Random(3)
    sent = receipt(0.01, rng)
    with pytest.raises(SyncProofError, match=r"expected at most 0\.24"):
        prove(sent, SHA, noisy(sent.canary.logprobs, rng, 0.4), NOISE)


def test_without_noise_a_tie_is_no_proof():
    canary = Canary(((1, 2, 3),), (-1.0, -2.0), (-1.02, -2.0))
    with pytest.raises(SyncProofError, match="did not take effect"):
        prove(Receipt(None, PolicyVersion(0, 1), SHA, canary), SHA, [(-1.01, -2.0)])
