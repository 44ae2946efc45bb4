"""Faults no loss may have, and what all of them have in common; each test runs over the union."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_oracle import LOSSES, Example

from configs.schema.rl_losses import DecoupledPpo, PpoClip
from tasks.rl.effective import EffectiveSamples
from tasks.rl.kl import kl_loss
from tasks.rl.losses import (
    DenominatorError,
    merge_metrics,
    policy_denominator,
    policy_loss,
    scaled,
    summarise,
)

every_loss = pytest.mark.parametrize("name", LOSSES)


def example(learner, sampler, advantages, mask=None, **fields) -> Example:
    mask = mask or [[True] * len(row) for row in learner]
    return Example(learner, sampler, advantages, mask, dtype=torch.float32, **fields)


# --- A01: importance ratio overflow ---


@every_loss
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [89.0, -1e4, math.inf, -math.inf])
def test_a01_overflow_is_finite_and_leaves_other_samples_alone_to_the_bit(
    name, log_ratio, advantage
):
    healthy = [-0.9, -0.6, -1.9]  # mean log-ratio −1/30: inside every bound of a good sample
    learner = [[-2.0, -1.0, -1.0], [-1.0, -0.5, -2.0]]
    advantages = [[advantage] * 3, [0.7] * 3]
    poisoned = example(learner, [[-2.0 - log_ratio, -1.0, -1.0], healthy], advantages)
    loss, gradient, metrics = poisoned.run(LOSSES[name], 6.0)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert metrics["clamped_tokens_sum"] == 1
    assert metrics["log_ratio_abs_max"] == abs(log_ratio)  # raw, beside the clamped weight
    assert metrics["weight_max"] <= math.exp(20) * (1 + 1e-6)
    assert metrics["kept_tokens_sum"].isfinite()
    _, clean, _ = example(learner, [[-2.0, -1.0, -1.0], healthy], advantages).run(LOSSES[name], 6.0)
    assert torch.equal(gradient[1], clean[1])
    assert clean[1].any()


@every_loss
@pytest.mark.parametrize("poison", [1e38, math.nan, -math.inf])
def test_a01_masked_token_is_exactly_absent(name, poison):
    # In loss, gradient and every metric, whichever of the three is poisoned.
    config, alone = LOSSES[name], example([[-1.0, -2.0]], [[-1.1, -2.2]], [[0.5, 0.5]])
    loss_alone, gradient_alone, metrics_alone = alone.run(config, 2.0)
    for where in range(3):
        values = [[-1.0, -1.0, -2.0], [-1.0, -1.1, -2.2], [0.5, 0.5, 0.5]]
        values[where][0] = poison
        masked = example(*([row] for row in values), [[False, True, True]])
        loss, gradient, metrics = masked.run(config, 2.0)
        assert loss == loss_alone
        assert gradient[0, 0] == 0.0
        assert torch.equal(gradient[:, 1:], gradient_alone)
        assert {k: v.item() for k, v in metrics.items()} == {
            k: v.item() for k, v in metrics_alone.items()
        }


@every_loss
@pytest.mark.parametrize("where", ["learner", "sampler", "advantage"])
def test_a01_nan_on_a_trained_token_stays_visible(name, where):
    values = {"learner": [-2.0, -1.0], "sampler": [-2.0, -1.0], "advantage": [1.0, 1.0]}
    values[where][0] = math.nan
    loss, _, _ = example(*([row] for row in values.values())).run(LOSSES[name], 2.0)
    assert math.isnan(loss)


# --- A02, A04: no credit, no push ---


@every_loss
def test_a02_a04_without_an_advantage_nothing_moves(name):
    # An all-equal group, and an answer nobody could score, come here as zeros.
    learner, sampler = [[-0.1, -3.0], [-2.0, -1.0]], [[-2.0, -1.0], [-2.0, -1.0]]
    loss, gradient, metrics = example(learner, sampler, [[0.0] * 2] * 2).run(LOSSES[name], 4.0)
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros(2, 2))
    assert metrics["advantage_tokens_sum"] == metrics["kept_tokens_sum"] == 0
    assert "kept_token_share" not in summarise(merge_metrics([metrics]))


# --- A03: denominators and micro-batches ---


@every_loss
@pytest.mark.parametrize("denominator", [0.0, 128.0])
@pytest.mark.parametrize("shape", [(2, 3), (2, 0)])
def test_a03_all_masked_is_zero_with_zero_gradient(name, denominator, shape):
    nothing = torch.full(shape, math.nan).tolist()
    masked = example(nothing, nothing, nothing, torch.zeros(shape, dtype=bool).tolist())
    masked.steps = torch.zeros(shape, dtype=torch.int64).tolist()
    loss, gradient, metrics = masked.run(LOSSES[name], denominator)
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros(shape))
    assert set(summarise(merge_metrics([metrics])).values()) <= {0.0}


@every_loss
def test_a03_trained_tokens_without_a_denominator_is_an_error(name):
    for denominator in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(DenominatorError, match="denominator="):
            example([[-1.0]], [[-1.0]], [[1.0]]).run(LOSSES[name], denominator)


@every_loss
def test_a03_a_masked_completion_dilutes_nothing(name):
    # Lengths 4 (ended) and 16 (cut off, masked), ratio 1, A = −1: 4/4 by tokens, 1/1 by samples;
    # by constant both samples count, as the source of that denominator has it: 4/(2·16).
    config = LOSSES[name]
    mask = [[t < 4 for t in range(16)], [False] * 16]
    cut = example([[0.0] * 16] * 2, [[0.0] * 16] * 2, [[-1.0] * 16] * 2, mask)
    denominator = policy_denominator([cut.batch()], config, 16)
    assert denominator == {"token_mean": 4, "sequence_mean": 1, "constant": 32}[config.aggregation]
    _, gradient, _ = cut.run(config, denominator)
    push = {"token_mean": 1 / 4, "sequence_mean": 1 / 4, "constant": 1 / 32}[config.aggregation]
    assert gradient[0].tolist() == [pytest.approx(push)] * 4 + [0.0] * 12
    assert torch.equal(gradient[1], torch.zeros(16))


@every_loss
def test_a03_any_split_into_micro_batches_gives_the_same_step(name):
    torch.manual_seed(2)
    config = LOSSES[name]
    sampler, mask = -torch.rand(6, 7), torch.rand(6, 7) > 0.4
    mask[2] = False  # one sample with nothing to train on, alone in its micro-batch below
    learner, advantages = sampler + 0.3 * torch.randn(6, 7), torch.randn(6, 7)
    steps = torch.randint(1, 4, (6, 7))

    def part(rows):
        tensors = (learner, sampler, advantages, mask, steps)
        values = [t[rows].tolist() for t in tensors]
        return example(*values[:4], steps=values[4])

    whole, parts = part(slice(6)), [part(s) for s in (slice(0, 2), slice(2, 3), slice(3, 6))]
    denominator = policy_denominator([whole.batch()], config, 9)
    assert policy_denominator([p.batch() for p in parts], config, 9) == denominator
    loss, gradient, metrics = whole.run(config, denominator)
    runs = [p.run(config, denominator) for p in parts]
    assert sum(r[0] for r in runs) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(torch.cat([r[1] for r in runs]), gradient)
    assert summarise(merge_metrics([r[2] for r in runs])) == pytest.approx(
        summarise(merge_metrics([metrics])), rel=1e-6
    )


# --- A05–A08 ---


@every_loss
def test_a05_a06_on_policy_every_loss_is_the_plain_policy_gradient(name):
    # Same tempered logprobs on all sides: ratio 1, so whatever the surrogate the gradient is −A,
    # over tokens, or over samples and each one's tokens.
    config, logprobs = LOSSES[name], [[-0.01815, -4.01815, -1.0], [-2.0, -0.3, -9.0]]
    mask = [[True, True, True], [True, False, False]]
    on_policy = example(logprobs, logprobs, [[1.0] * 3, [-2.0] * 3], mask)
    denominator = policy_denominator([on_policy.batch()], config, 10)
    _, gradient, metrics = on_policy.run(config, denominator)
    per_token = {
        "token_mean": [1 / 4, 1 / 4],
        "sequence_mean": [1 / 6, 1 / 2],
        "constant": [1 / 20, 1 / 20],
    }[config.aggregation]
    assert gradient[0].tolist() == [pytest.approx(-per_token[0])] * 3
    assert gradient[1].tolist() == [pytest.approx(2 * per_token[1]), 0.0, 0.0]
    shares = summarise(merge_metrics([metrics]))
    for share in ("ess_share", "kept_token_share", "ratio_mean", "weight_max"):
        assert shares[share] == 1.0, share
    for share in ("clip_fraction", "log_ratio_abs_mean", "rejected_sample_share"):
        assert shares[share] == 0.0, share


@every_loss
def test_a05_kl_of_equal_policies_is_zero_under_every_aggregation(name):
    batch = example([[-1.0, -2.0]], [[-1.5, -2.0]], [[1.0] * 2]).batch()
    learner = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    kl = kl_loss(learner, learner.detach().clone(), batch, 2.0, LOSSES[name].aggregation)
    kl.loss.backward()
    assert (kl.loss.item(), learner.grad.tolist()) == (0.0, [[0.0, 0.0]])


@every_loss
def test_a07_an_infinite_logprob_reaches_the_guard_or_nothing(name):
    # log π_θ = −inf on a trained token: either it is clamped away or the loss is not finite, so
    # that the step is skipped; never a finite loss with a NaN gradient.
    loss, gradient, _ = example([[-math.inf, -1.0]], [[-1.0, -1.0]], [[1.0, 1.0]]).run(
        LOSSES[name], 2.0
    )
    assert not math.isfinite(loss) or gradient.isfinite().all()


@every_loss
def test_a08_an_end_token_that_equals_padding_is_trained_on(name):
    # pad id = eos id = 0; ids [5, 6, 0, 7, 8, 0 | 0, 0], true length 6.
    mask = [[False] + [True] * 5 + [False] * 2]
    padded = example([[-1.0] * 8], [[-1.0] * 8], [[1.0] * 8], mask)
    _, gradient, _ = padded.run(LOSSES[name], 5.0)
    assert (gradient != 0).tolist() == mask


# --- what a tighter bound costs ---


def kept_and_ess(config, run: Example) -> tuple[float, float, float]:
    metrics = run.run(config, 1.0)[2]
    shares = summarise(merge_metrics([metrics]))
    samples = int(metrics["advantage_samples_sum"])
    kept, ess = shares["kept_token_share"], shares["ess_share"]
    return EffectiveSamples(samples, kept, ess).value, kept, ess


@every_loss
def test_a_tighter_bound_gives_fewer_effective_samples(name):
    torch.manual_seed(0)
    sampler = -torch.rand(32, 8)
    spread = torch.logspace(-3.5, 0.2, 32)[:, None]  # from GSPO's bounds to CISPO's
    run = example(
        (sampler + spread * torch.randn(32, 8)).tolist(),
        sampler.tolist(),
        torch.randn(32, 1).expand(32, 8).tolist(),
    )
    found = [kept_and_ess(scaled(LOSSES[name], s), run) for s in (1.0, 0.5, 0.2, 0.05)]
    effective = [f[0] for f in found]
    assert effective == sorted(effective, reverse=True)
    assert effective[-1] < effective[0]
    assert len({f[2] for f in found}) == 1  # the ESS of raw weights does not see the bound


@every_loss
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16), spread=st.floats(0, 5), shares=st.tuples(*[st.floats(0.01, 1)] * 2)
)
def test_no_tighter_bound_ever_keeps_more(name, seed, spread, shares):
    generator = torch.Generator().manual_seed(seed)
    sampler = -torch.rand(4, 5, generator=generator)
    learner = sampler + spread * torch.randn(4, 5, generator=generator)
    advantages = torch.randn(4, 5, generator=generator)
    run = example(learner.tolist(), sampler.tolist(), advantages.tolist())
    run.steps = torch.randint(0, 4, (4, 5), generator=generator).tolist()
    loose, tight = (kept_and_ess(scaled(LOSSES[name], s), run) for s in sorted(shares)[::-1])
    assert 0 <= tight[1] <= loose[1] + 1e-6
    assert loose[1] <= 1 + 1e-6
    assert tight[2] == loose[2]


def test_geometric_rejection_judges_tokens_of_the_present_version_alone():
    # Band 0.9 to 1.1, learner at step 3. Row 0: its present tokens have mean log-ratio 0.2 → out.
    # Row 1: the same ratios, all of older versions → not judged. Row 2: mean of present ones 0.05,
    # an older one far off → in. Row 3: present mean −0.2 → out.
    config = PpoClip(geometric_reject={"low": 0.9, "high": 1.1})
    log_ratio = [[0.2, 0.2], [0.2, 0.2], [0.05, 2.0], [-0.1, -0.3]]
    steps = [[3, 3], [2, 1], [3, 2], [3, 3]]
    run = example(
        [[-1 + x for x in row] for row in log_ratio], [[-1.0] * 2] * 4, [[1.0] * 2] * 4, steps=steps
    )
    _, gradient, metrics = run.run(config, 8.0)
    assert gradient.any(dim=1).tolist() == [False, True, True, False]
    shares = summarise(merge_metrics([metrics]))
    assert shares["rejected_sample_share"] == 0.5
    # Of 8 tokens: 4 rejected, and of the rest the one at ratio e² is clipped.
    assert shares["kept_token_share"] == pytest.approx(3 / 8)


def test_a_rejected_sample_is_selected_away_and_not_multiplied_by_zero():
    run = example([[-math.inf, -1.0], [-1.0, -1.0]], [[-1.0] * 2] * 2, [[1.0] * 2] * 2)
    loss, gradient, metrics = run.run(LOSSES["icepop_reject"], 4.0)
    assert metrics["rejected_samples_sum"] == 1
    assert loss == 0.5
    assert gradient.tolist() == [[0.0, 0.0], [-0.25, -0.25]]


def test_geometric_rejection_under_decoupled_ppo_judges_the_proximal_policy():
    # π_p = μ·e^0.5 is out, whatever π_θ has become since.
    config = DecoupledPpo(geometric_reject={"low": 0.9, "high": 1.1})
    run = example([[-1.0]], [[-1.0]], [[1.0]], proximal=[[-0.5]])
    assert run.run(config, 1.0)[2]["rejected_samples_sum"] == 1
    run.proximal, run.learner = [[-1.0]], [[-0.5]]
    assert run.run(config, 1.0)[2]["rejected_samples_sum"] == 0


def test_metrics_carry_no_gradient_and_no_loss_reads_the_proximal_policys():
    for config in LOSSES.values():
        run = example([[-1.0]], [[-1.1]], [[1.0]])
        proximal = torch.tensor([[-1.0]], requires_grad=True)
        output = policy_loss(
            torch.tensor([[-1.0]], requires_grad=True), run.batch(), config, 1.0, proximal,
            versions=run.versions,
        )  # fmt: skip
        assert not any(value.requires_grad for value in output.metrics.values())
        output.loss.backward()
        assert proximal.grad is None
