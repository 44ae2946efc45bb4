"""Credit against the exact policy gradient of a toy MDP small enough to sum over.

State "start" chooses stop or go on; going on pays an intermediate reward and leads to one of two
states by chance, where a second choice is made.
"""

import itertools
import math

import pytest
import torch

from tasks.rl.credit import (
    return_to_go,
    return_to_go_loo,
    turn_gae,
)

EPISODE_PARAMETERS = torch.tensor([0.3, -0.4, 0.7], dtype=torch.float64)
"""Logit of action 1 in state 0 (start), 1 and 2."""
STOP_REWARD, STEP_REWARD = 0.5, 0.2
FINAL_REWARD = {(1, 0): 0.0, (1, 1): 1.0, (2, 0): 0.6, (2, 1): -0.3}


def _episodes(logits):
    """Every episode: (probability, [(state, action), …], [reward of each turn])."""
    p = torch.sigmoid(logits)
    yield 1 - p[0], [(0, 0)], [STOP_REWARD]
    for state, chance in ((1, 0.25), (2, 0.75)):
        for action in (0, 1):
            chosen = p[state] if action else 1 - p[state]
            yield (
                p[0] * chance * chosen,
                [(0, 1), (state, action)],
                [
                    STEP_REWARD,
                    FINAL_REWARD[state, action],
                ],
            )


def _exact_gradient(gamma):
    logits = EPISODE_PARAMETERS.clone().requires_grad_()
    value = sum(
        probability * sum(gamma**k * r for k, r in enumerate(rewards))
        for probability, _, rewards in _episodes(logits)
    )
    return torch.autograd.grad(value, logits)[0]


def _score(steps, advantages, gamma):
    """Σ_k γ^k ∇ log π(a_k | s_k) A_k."""
    logits = EPISODE_PARAMETERS.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for k, ((state, action), advantage) in enumerate(zip(steps, advantages, strict=True)):
        sign = 1 if action else -1
        total = total + gamma**k * advantage * torch.nn.functional.logsigmoid(sign * logits[state])
    return torch.autograd.grad(total, logits, allow_unused=True)[0]


def _exact_values(gamma):
    p = torch.sigmoid(EPISODE_PARAMETERS).tolist()
    values = {s: p[s] * FINAL_REWARD[s, 1] + (1 - p[s]) * FINAL_REWARD[s, 0] for s in (1, 2)}
    go_on = STEP_REWARD + gamma * (0.25 * values[1] + 0.75 * values[2])
    return {0: p[0] * go_on + (1 - p[0]) * STOP_REWARD, **values}


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.5, 0.0])
def test_turn_gae_with_exact_values_is_the_exact_policy_gradient(gamma, lam):
    values = _exact_values(gamma)
    gradient = torch.zeros(3, dtype=torch.float64)
    for probability, steps, rewards in _episodes(EPISODE_PARAMETERS):
        advantages, _ = turn_gae(rewards, [values[s] for s, _ in steps], 0.0, gamma, lam)
        gradient += probability * _score(steps, advantages, gamma)
    torch.testing.assert_close(gradient, _exact_gradient(gamma), rtol=0, atol=1e-12)


def test_turn_gae_at_lambda_one_is_exact_under_any_values():
    # At λ = 1 the values are only a baseline, so wrong ones cost variance and no bias.
    gradient = torch.zeros(3, dtype=torch.float64)
    for probability, steps, rewards in _episodes(EPISODE_PARAMETERS):
        advantages, _ = turn_gae(rewards, [7.0 - 3 * s for s, _ in steps], 0.0, 1.0, 1.0)
        gradient += probability * _score(steps, advantages, 1.0)
    torch.testing.assert_close(gradient, _exact_gradient(1.0), rtol=0, atol=1e-12)


def _expected_group_gradient(credit, gamma, group_size):
    """Mean over all groups, weighted by probability, of the first sample's gradient."""
    gradient = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(list(_episodes(EPISODE_PARAMETERS)), repeat=group_size):
        probability = math.prod(float(p) for p, _, _ in group)
        advantages = credit([rewards for _, _, rewards in group], gamma)
        gradient += probability * _score(group[0][1], advantages[0], gamma)
    return gradient


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("group_size", [2, 3])
def test_return_to_go_loo_is_the_exact_policy_gradient(gamma, group_size):
    gradient = _expected_group_gradient(return_to_go_loo, gamma, group_size)
    torch.testing.assert_close(gradient, _exact_gradient(gamma), rtol=0, atol=1e-12)


def test_a_baseline_per_turn_reward_would_be_biased():
    # The credit that this project avoids: centre each turn's reward among the samples that have
    # that turn, then sum to go. Sampling an extra turn then costs its expected reward.
    def per_turn_reward_credit(turn_rewards_G, gamma):
        centred = [
            [
                r
                - (
                    sum(peers) / len(peers)
                    if (
                        peers := [
                            q[k] for j, q in enumerate(turn_rewards_G) if j != i and k < len(q)
                        ]
                    )
                    else 0.0
                )
                for k, r in enumerate(rewards)
            ]
            for i, rewards in enumerate(turn_rewards_G)
        ]
        return [return_to_go(rewards, gamma) for rewards in centred]

    gradient = _expected_group_gradient(per_turn_reward_credit, 1.0, 3)
    assert (gradient - _exact_gradient(1.0)).abs().max() > 1e-2
