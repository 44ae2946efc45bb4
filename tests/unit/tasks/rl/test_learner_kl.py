"""KL to the snapshot: off the reward, in the loss, only watched, and no number."""

import math
from dataclasses import replace

import pytest
from learner_parts import groups, learner_of, references, weights

from tasks.rl.batch import without_credit
from tasks.rl.learner_prepass import NonFiniteKlError, prepass

__all__ = ["groups", "learner_of"]


def test_kl_off_the_reward_by_hand(learner_of, groups):
    learner = learner_of(kl={"placement": "reward"})
    for _ in range(3):
        learner.train(groups, 0.0)
    penalised = prepass(learner, groups, 0.2).groups
    reference = references(learner, groups)
    order = without_credit(groups, with_values=False)
    lengths = sorted(range(len(order)), key=lambda i: -len(order[i].scored.rollout.token_ids))
    expected = {}
    for row, i in enumerate(lengths):
        scored = order[i].scored
        k1 = sum(
            mu - float(ref)
            for mu, ref, mask in zip(
                scored.rollout.sampler_logprobs, reference[row], scored.rollout.action_mask,
                strict=False,
            )
            if mask
        )  # fmt: skip
        expected[scored.rollout.rollout_id] = scored.reward - 0.2 * k1
    for scored in (r for g in penalised for r in g.rollouts):
        assert scored.reward == pytest.approx(expected[scored.rollout.rollout_id], abs=1e-4)
        assert sum(scored.turn_rewards) == pytest.approx(scored.reward, abs=1e-4)
        assert scored.outcome in (0.0, 1.0)  # accuracy does not see the penalty


def test_kl_in_the_loss_holds_the_policy_back(learner_of, groups):
    drift = []
    for coefficient in (0.0, 5.0):
        learner = learner_of()
        for _ in range(8):
            report = learner.train(groups, coefficient)
        drift.append(report.metrics["kl_k3_mean"])
    assert drift[1] < 0.5 * drift[0]


def test_kl_that_is_only_watched_is_measured_in_every_nth_step(learner_of, groups):
    often = learner_of(kl={"coefficient": 0.0})
    seldom = learner_of(kl={"coefficient": 0.0, "measure_every": 3})
    seen = [[x.train(groups, 0.0) for _ in range(4)] for x in (often, seldom)]
    assert ["kl_k1_mean" in report.metrics for report in seen[0]] == [True] * 4
    assert ["kl_k1_mean" in report.metrics for report in seen[1]] == [True, False, False, True]
    assert weights(often) == weights(seldom)
    trained_on = learner_of(kl={"coefficient": 0.01, "measure_every": 3})
    assert all("kl_k1_mean" in trained_on.train(groups, 0.01).metrics for _ in range(3))


def test_kl_that_is_no_number_does_not_pass_for_a_fault_of_the_grader(learner_of, groups):
    learner = learner_of(kl={"placement": "reward"})
    (first, *others) = groups[0].rollouts
    nan = tuple(math.nan if a else 0.0 for a in first.rollout.action_mask)
    bad = replace(first, rollout=replace(first.rollout, sampler_logprobs=nan))
    name = first.rollout.rollout_id
    with pytest.raises(NonFiniteKlError, match=f"sample {name} of row .* is nan .*placement=loss"):
        learner.train([replace(groups[0], rollouts=(bad, *others)), *groups[1:]], 0.1)
