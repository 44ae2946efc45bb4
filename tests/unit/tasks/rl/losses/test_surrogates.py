"""Each loss by hand, against plain Python, and against finite differences in float64."""

import math

import pytest
import torch
from loss_oracle import LOSSES, Example, oracle

from configs.schema.rl_losses import Cispo, DecoupledPpo, Gspo, IcePop, PpoClip, Tis
from tasks.rl.losses import StepVersions, merge_metrics, summarise

E = math.e
NO_GRADIENT = 0.0


def one_row(ratios, advantages, **fields) -> Example:
    """One sample whose π_θ/μ is as given, all of it trained."""
    return Example(
        learner=[[-1.0 + math.log(r) for r in ratios]],
        sampler=[[-1.0] * len(ratios)],
        advantages=[list(advantages)],
        mask=[[True] * len(ratios)],
        **fields,
    )


def shares(metrics):
    return summarise(merge_metrics([metrics]))


@pytest.mark.parametrize(
    ("config", "ratio", "advantage", "weight", "kept"),
    [
        # CISPO: −sg(clip(r, 0, 5)) A log π
        (Cispo(), 1.0, 2.0, 1.0, 1.0),
        (Cispo(), 4.0, 1.0, 4.0, 1.0),
        (Cispo(), 10.0, 1.0, 5.0, 0.5),  # cut to 5: half the raw weight pushes
        (Cispo(), 10.0, -1.0, 5.0, 0.5),  # whichever the sign
        (Cispo(), 0.01, 1.0, 0.01, 1.0),  # no lower bound at ε_l = 1
        (Cispo(clip_low=0.2), 0.4, -1.0, 0.8, 0.5),  # raised to 0.8: 0.4/0.8
        # TIS: −sg(min(r, C)) A log π
        (Tis(), 1.5, 1.0, 1.5, 1.0),
        (Tis(), 8.0, 1.0, 2.0, 0.25),
        (Tis(cap=5.0), 8.0, -1.0, 5.0, 0.625),
        (Tis(), 0.1, 1.0, 0.1, 1.0),
        # IcePop: r inside [0.5, 5], nothing outside
        (IcePop(), 3.0, 1.0, 3.0, 1.0),
        (IcePop(), 5.5, 1.0, 0.0, 0.0),
        (IcePop(), 0.4, -1.0, 0.0, 0.0),
        (IcePop(low=0.0), 0.4, -1.0, 0.4, 1.0),
        (IcePop(high=2.0), 1.9, 1.0, 1.9, 1.0),
    ],
)
def test_weighted_likelihoods_by_hand(config, ratio, advantage, weight, kept):
    example = one_row([ratio], [advantage])
    loss, gradient, metrics = example.run(config, 1.0)
    assert loss == pytest.approx(-weight * advantage * example.learner[0][0], abs=1e-12)
    assert gradient.item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert metrics["kept_tokens_sum"].item() == pytest.approx(kept, abs=1e-9)
    assert metrics["clipped_tokens_sum"] == (kept < 1)


def test_tis_by_sample_by_hand():
    # Ratios 2 and 3: product 6, cut to 5 for both tokens; kept 5/6 each.
    # With ratios ½ and 3 it is 1.5, below the cap, though 3 alone would not be with cap 2.
    loss, gradient, metrics = one_row([2.0, 3.0], [1.0, -1.0]).run(Tis(level="sequence", cap=5), 2)
    learner = [-1 + math.log(2), -1 + math.log(3)]
    assert loss == pytest.approx(-(5 * learner[0] - 5 * learner[1]) / 2)
    assert gradient.tolist() == [[pytest.approx(-2.5), pytest.approx(2.5)]]
    assert shares(metrics)["kept_token_share"] == pytest.approx(5 / 6)
    _, gradient, metrics = one_row([0.5, 3.0], [1.0, 1.0]).run(Tis(level="sequence"), 1.0)
    assert gradient.tolist() == [[pytest.approx(-1.5), pytest.approx(-1.5)]]
    assert shares(metrics)["kept_token_share"] == 1.0


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "objective", "pushes"),
    [
        # s = exp of the mean log-ratio: one token far off is held by the others.
        ((0.04, -0.04), 1.0, 1.0, True),
        ((0.0006, 0.0), 1.0, math.exp(0.0003), True),  # 1.0003 < 1.0004
        ((0.002, 0.0), 1.0, 1.0004, False),
        ((0.002, 0.0), -1.0, -math.exp(0.001), True),  # above, A < 0: pushes
        ((-0.002, 0.0), -1.0, -0.9997, False),
        ((-0.002, 0.0), 1.0, math.exp(-0.001), True),
    ],
)
def test_gspo_by_hand(log_ratios, advantage, objective, pushes):
    example = one_row([math.exp(x) for x in log_ratios], [advantage] * 2)
    loss, gradient, metrics = example.run(Gspo(), 1.0)
    assert loss == pytest.approx(-objective, rel=1e-12)
    # Sequence mean: each of the two tokens carries half of s A.
    s = math.exp(sum(log_ratios) / 2)
    expected = -s * advantage / 2 if pushes else NO_GRADIENT
    assert gradient.tolist() == [[pytest.approx(expected)] * 2]
    assert shares(metrics)["kept_token_share"] == float(pushes)


def test_gspo_gives_each_token_its_own_advantage():
    # Turn credit: advantages 1 and −2 in one sample at s = 1 (log-ratios ±0.1).
    example = one_row([math.exp(0.1), math.exp(-0.1)], [1.0, -2.0])
    loss, gradient, _ = example.run(Gspo(), 1.0)
    assert loss == pytest.approx((-1 + 2) / 2)
    assert gradient.tolist() == [[pytest.approx(-0.5), pytest.approx(1.0)]]


def test_gspo_samples_count_alike_whatever_their_length():
    # Lengths 1 and 3, ratio 1, A = 1: (1/1 · 1 + 3/3 · 1) / 2 = 1, gradients ½ and ⅙ each.
    example = Example(
        [[-1.0] * 3] * 2, [[-1.0] * 3] * 2, [[1.0] * 3] * 2, [[True, False, False], [True] * 3]
    )
    loss, gradient, _ = example.run(Gspo(), 2.0)
    assert loss == pytest.approx(-1.0)
    assert gradient[0].tolist() == [-0.5, 0, 0]
    assert gradient[1].tolist() == [pytest.approx(-1 / 6)] * 3


@pytest.mark.parametrize(
    ("log_p", "log_theta", "advantage", "loss", "gradient"),
    [
        # log μ = −1. ρ = e^{log π_p + 1}, r = e^{log π_θ − log π_p}.
        (-1.0, -1.0, 1.0, -1.0, -1.0),
        (-1.0 + math.log(1.5), -1.0 + math.log(1.5), 1.0, -1.5, -1.5),  # ρ 1.5, r 1
        (-1.0 + math.log(4), -1.0 + math.log(4), 1.0, -2.0, -2.0),  # ρ 4 → 2
        (-1.0 + math.log(4), -1.0 + math.log(6), 1.0, -2 * 1.28, 0.0),  # r 1.5 → 1.28
        (-1.0 + math.log(4), -1.0 + math.log(6), -1.0, 2 * 1.5, 2 * 1.5),  # A < 0 pushes back
        (-1.0 - math.log(2), -1.0 - math.log(4), -1.0, 0.5 * 0.8, 0.0),  # ρ ½, r ½ → .8
        (-1.0 - math.log(2), -1.0 + math.log(4), -1.0, 0.5 * 3, 0.0),  # r 8: dual clip 3
    ],
)
def test_decoupled_ppo_by_hand(log_p, log_theta, advantage, loss, gradient):
    example = Example([[log_theta]], [[-1.0]], [[advantage]], [[True]], proximal=[[log_p]])
    found, slope, _ = example.run(DecoupledPpo(), 1.0)
    assert found == pytest.approx(loss)
    assert slope.item() == pytest.approx(gradient)


def test_decoupled_ppo_keeps_the_product_of_what_weight_and_clip_keep():
    # ρ = 4 cut to 2 keeps ½; the second token is clipped as well; the third is untouched.
    log4 = math.log(4)
    example = Example(
        [[-1 + log4, -1 + math.log(6), -1.0]],
        [[-1.0] * 3],
        [[1.0] * 3],
        [[True] * 3],
        proximal=[[-1 + log4, -1 + log4, -1.0]],
    )
    _, _, metrics = example.run(DecoupledPpo(), 3.0)
    assert metrics["kept_tokens_sum"].item() == pytest.approx(0.5 + 0 + 1)
    assert metrics["clipped_tokens_sum"] == 2


def test_decoupled_ppo_in_the_first_step_is_truncated_importance_sampling():
    # π_p = π_θ: r = 1 and the gradient is −min(ρ, C) A, as for `tis`.
    torch.manual_seed(7)
    example = Example(
        (-torch.rand(3, 6).double()).tolist(),
        (-torch.rand(3, 6).double() * 3).tolist(),
        torch.randn(3, 6).double().tolist(),
        (torch.rand(3, 6) > 0.2).tolist(),
    )
    for ours, theirs in ((DecoupledPpo(), Tis()), (DecoupledPpo(correction=IcePop()), IcePop())):
        torch.testing.assert_close(example.run(ours, 9.0)[1], example.run(theirs, 9.0)[1])


@pytest.mark.parametrize(
    ("v_mu", "v_p", "v_theta", "alpha"),
    [(0, 3, 4, 3 / 4), (2, 3, 4, 1 / 2), (3, 3, 4, 0.0), (4, 4, 4, 1.0), (0, 4, 4, 1.0)],
)
def test_interpolated_proximal_policy_by_hand(v_mu, v_p, v_theta, alpha):
    # log μ = −2, log π_θ = −1: log π_p = −2 + α. ρ = e^α ≤ 2 here only up to α = ln 2.
    example = Example(
        [[-1.0]], [[-2.0]], [[-1.0]], [[True]], [[v_mu]], versions=StepVersions(v_p, v_theta)
    )
    loss, gradient, _ = example.run(DecoupledPpo(proximal="interpolated", dual_clip=None), 1.0)
    expected = min(E**alpha, 2.0) * E ** (1 - alpha)
    assert loss == pytest.approx(expected)
    assert gradient.item() == pytest.approx(expected)


def test_interpolated_ratio_is_one_where_nothing_was_learnt_since():
    # v_θ = v_μ: no clip can act however far the engines disagree; the weight alone corrects.
    example = Example(
        [[-1.0, -9.0]], [[-9.0, -1.0]], [[1.0, 1.0]], [[True] * 2], [[5, 5]],
        versions=StepVersions(5, 5),
    )  # fmt: skip
    _, gradient, _ = example.run(DecoupledPpo(proximal="interpolated"), 1.0)
    assert gradient.tolist() == [[pytest.approx(-2.0), pytest.approx(-(E**-8))]]


# --- every loss against plain Python, and its gradient against finite differences ---


def random_example(config, seed: int) -> Example:
    torch.manual_seed(seed)
    rows, length = 4, 6
    sampler = -torch.rand(rows, length, dtype=torch.float64) * 3
    learner = sampler + 0.5 * torch.randn(rows, length, dtype=torch.float64)
    learner[0] += torch.randn(length, dtype=torch.float64)
    learner[1] = sampler[1] + 0.02 * torch.randn(length, dtype=torch.float64)
    advantages = torch.randn(rows, 1, dtype=torch.float64).expand(rows, length)
    mask = torch.rand(rows, length) > 0.3
    mask[3] = False
    versions, proximal = StepVersions(3, 3), None
    if isinstance(config, DecoupledPpo) and seed % 2:
        versions = StepVersions(3, 5)
        if config.proximal == "exact":
            proximal = (learner + 0.2 * torch.randn(rows, length).double()).tolist()
    return Example(
        learner.tolist(), sampler.tolist(), advantages.tolist(), mask.tolist(),
        torch.randint(1, 4, (rows, length)).tolist(), proximal, versions,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_match_plain_python_and_finite_differences(name, seed):
    config, h, denominator = LOSSES[name], 1e-6, 7.0
    example = random_example(config, seed)
    loss, gradient, _ = example.run(config, denominator)
    frozen = example.learner
    assert loss == pytest.approx(oracle(example, config, denominator, frozen, frozen), rel=1e-12)
    for i in range(4):
        for t in range(6):

            def at(shift, i=i, t=t):
                moved = [list(row) for row in frozen]
                moved[i][t] += shift
                return oracle(example, config, denominator, moved, frozen)

            numeric = (at(h) - at(-h)) / (2 * h)
            assert gradient[i, t].item() == pytest.approx(numeric, abs=1e-8, rel=1e-6), (i, t)


def test_the_random_examples_meet_every_branch():
    # What the comparison above rests on: both sides of every bound, and rejected samples, occur.
    for name, config in LOSSES.items():
        found = [random_example(config, s).run(config, 1.0)[2] for s in range(4)]
        merged = merge_metrics(found)
        assert 0 < merged["kept_tokens_sum"] < merged["advantage_tokens_sum"], name
        if config.geometric_reject is not None:
            assert 0 < merged["rejected_samples_sum"] < merged["sequences_sum"], name
    narrow = PpoClip(clip_low=0.01, clip_high=0.01)
    assert random_example(narrow, 0).run(narrow, 1.0)[2]["clipped_tokens_sum"] > 0
