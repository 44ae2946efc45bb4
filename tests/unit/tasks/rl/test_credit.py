"""Credit against numbers worked out by hand and against gradients summed over a whole toy MDP."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.rl_credit import DrGrpoCredit, GrpoCredit, RlooCredit
from tasks.rl.credit import (
    NonFiniteRewardError,
    TurnShapeError,
    broadcast_turns,
    group_credit,
    normalise_advantages,
    return_to_go,
    return_to_go_loo,
    scored_mean,
    turn_gae,
)
from tasks.sampling.types import PolicyVersion, StopReason, Turn

GRPO, DR_GRPO, RLOO = GrpoCredit(eps=1e-6), DrGrpoCredit(), RlooCredit()


def test_a02_low_variance_groups_keep_their_scale():
    # mean 1.000005, deviations ±5e-6, sample std 5e-6·√2 = 7.0711e-6;
    # 5e-6 / (7.0711e-6 + 1e-6) = 0.61949. Population std would give 5e-6 / 6e-6 = 0.8333.
    for group in ([1.00000, 1.00001], [2.00000, 2.00001]):
        assert group_credit(group, GRPO) == pytest.approx([-0.61949, 0.61949], abs=1e-5)


def test_a02_float32_rewards_differ_only_by_their_own_rounding():
    group = [np.float32(1.00000), np.float32(1.00001)]
    assert group_credit(group, GRPO) == pytest.approx([-0.6196, 0.6196], abs=5e-5)


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO, GrpoCredit(eps=1e-300)])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6, -1e6, 1e-300, 1e300])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a02_equal_rewards_give_exactly_zero(credit, reward, size):
    # 0.1 + 0.1 + 0.1 is not 3 × 0.1 in floating point, so this must not rest on subtraction.
    assert group_credit([reward] * size, credit) == [0.0] * size


def test_a02_large_offset_keeps_the_contrast():
    # mean 1e6 + 0.5, deviations ±0.5, sample std √0.5 = 0.70711
    assert group_credit([1e6, 1e6 + 1], GRPO) == pytest.approx([-0.70711, 0.70711], abs=1e-5)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_a02_squares_neither_underflow_nor_overflow(scale):
    # (0, 1, 1)·s: mean 2s/3, deviations (−2/3, 1/3, 1/3)s, sample std s/√3:
    # −1.1547, .57735, .57735
    advantages = group_credit([0.0, scale, scale], GrpoCredit(eps=1e-300))
    assert advantages == pytest.approx([-1.154701, 0.577350, 0.577350], abs=1e-5)


def test_a04_statistics_over_scored_members_only():
    # scored 1, 0, 1: mean 2/3, sample std 0.57735;
    # (1/3)/0.57745 = 0.57725, (−2/3)/0.57745 = −1.15450
    advantages = group_credit([1, 0, None, 1], GrpoCredit(eps=1e-4))
    assert advantages == pytest.approx([0.57725, -1.15450, 0.0, 0.57725], abs=1e-5)
    assert advantages[2] == 0.0


def test_a04_dr_grpo_over_scored_members_only():
    assert group_credit([1, 0, None, 1], DR_GRPO) == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3])


def test_a04_rloo_over_scored_members_only():
    # others of 1: (0 + 1)/2; of 0: (1 + 1)/2.
    assert group_credit([1, 0, None, 1], RLOO) == pytest.approx([0.5, -1.0, 0, 0.5])


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO])
@pytest.mark.parametrize("rewards", [[], [None] * 4, [1.0], [None, 1.0, None], [0.3, None]])
def test_a04_fewer_than_two_scored_is_zero(credit, rewards):
    assert group_credit(rewards, credit) == [0.0] * len(rewards)


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e308, -1.1e300])
@pytest.mark.parametrize("others", [[1.0, 0.0, 1.0], [None], [], [1e300, 1e300, -1e300]])
def test_a04_non_finite_reward_is_refused_with_its_row(credit, bad, others):
    with pytest.raises(NonFiniteRewardError, match=r"row-7.*sample \d") as caught:
        group_credit([*others, bad], credit, row_id="row-7")
    assert (caught.value.row_id, caught.value.index) == ("row-7", len(others))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a04_logged_mean_leaves_out_what_was_not_scored():
    # (0.5 + 0.8 + 0.6 + 0.7) / 4 = 0.65
    values = [0.5, math.nan, math.nan, 0.8, 0.6, 0.7]
    assert scored_mean(values) == pytest.approx(0.65)
    assert scored_mean([None if math.isnan(v) else v for v in values]) == pytest.approx(0.65)
    assert scored_mean([None, math.nan]) is None
    assert scored_mean([]) is None


def test_group_credit_sums_to_zero():
    assert math.fsum(group_credit([0.1, 0.9, 0.3, 0.05], GRPO)) == pytest.approx(0, abs=1e-12)


def test_turn_gae_by_hand_at_termination():
    # γ .5, λ .5, r (1, 2), V (3, 4), V_2 = 0:
    # δ_1 = 2 + 0 − 4 = −2 = A_1;  δ_0 = 1 + .5·4 − 3 = 0;  A_0 = 0 + .25·(−2) = −.5
    advantages, returns = turn_gae([1, 2], [3, 4], 0.0, 0.5, 0.5)
    assert advantages == [-0.5, -2.0]
    assert returns == [2.5, 2.0]


def test_turn_gae_by_hand_at_truncation_bootstraps():
    # as above with V_2 = 8: δ_1 = 2 + .5·8 − 4 = 2 = A_1; A_0 = 0 + .25·2 = .5
    advantages, returns = turn_gae([1, 2], [3, 4], 8.0, 0.5, 0.5)
    assert advantages == [0.5, 2.0]
    assert returns == [3.5, 6.0]


def test_turn_gae_edges():
    assert turn_gae([], [], 0.0, 0.9, 0.9) == ([], [])
    # One turn: A = r − V, whatever γ and λ.
    assert turn_gae([1.0], [0.25], 0.0, 0.9, 0.3) == ([0.75], [1.0])
    with pytest.raises(TurnShapeError):
        turn_gae([1.0], [1.0, 2.0], 0.0, 0.9, 0.9)
    with pytest.raises(NonFiniteRewardError, match="row 'row-4', turn 1, is nan"):
        turn_gae([1.0, math.nan], [0.0, 0.0], 0.0, 0.9, 0.9, row_id="row-4")


def test_turn_gae_credits_an_earlier_turn_across_the_observation():
    # The outcome falls on the last turn; with γ = λ = 1 the tool-calling turn earns all of it,
    # although observation tokens lie between them.
    advantages, _ = turn_gae([0, 1], [0, 0], 0.0, 1.0, 1.0)
    turns = [_turn(2, 4), _turn(7, 8)]
    assert broadcast_turns(advantages, turns, 9) == [0, 0, 1, 1, 0, 0, 0, 1, 0]


def test_broadcast_turns_gives_each_token_its_turns_value():
    turns = [_turn(1, 3), _turn(3, 3), _turn(4, 6)]
    assert broadcast_turns([2.0, 9.0, -1.0], turns, 6) == [0, 2, 2, 0, -1, -1]
    assert broadcast_turns([], [], 3) == [0, 0, 0]
    assert broadcast_turns([], [], 0) == []


@pytest.mark.parametrize(
    ("values", "spans", "length"),
    [
        ([1.0], [], 4),
        ([1.0, 2.0], [(0, 2), (1, 3)], 4),
        ([1.0], [(2, 5)], 4),
        ([1.0], [(3, 2)], 4),
        ([1.0, 2.0], [(2, 3), (0, 1)], 4),
        ([1.0], [(-1, 2)], 4),
    ],
)
def test_broadcast_turns_refuses_spans_that_do_not_fit(values, spans, length):
    with pytest.raises(TurnShapeError):
        broadcast_turns(values, [_turn(*span) for span in spans], length)


def test_return_to_go_by_hand():
    # 4; 2 + .5·4 = 4; 1 + .5·4 = 3
    assert return_to_go([1, 2, 4], 0.5) == [3, 4, 4]
    assert return_to_go([], 0.5) == []


def test_return_to_go_loo_by_hand():
    # γ = 1. Returns-to-go: (3, 2), (1,), (6, 4, 1).
    # Turn 0: 3 − (1+6)/2 = −.5; 1 − (3+6)/2 = −3.5; 6 − (3+1)/2 = 4.
    # Turn 1: peers that reached it: 2 − 4 = −2; 4 − 2 = 2. Turn 2: no peer: 1.
    advantages = return_to_go_loo([[1, 2], [1], [2, 3, 1]], 1.0)
    assert advantages == [[-0.5, -2], [-3.5], [4, 2, 1]]


def test_return_to_go_loo_leaves_unscored_samples_out():
    # scored 1 and 0 → 1 − 0 and 0 − 1
    assert return_to_go_loo([[1.0], None, [0.0]], 0.9) == [[1.0], [], [-1.0]]
    assert return_to_go_loo([None, None], 0.9) == [[], []]
    with pytest.raises(NonFiniteRewardError, match="row 'row-3', sample 1, turn 1, is inf"):
        return_to_go_loo([[1.0], [0.0, math.inf]], 0.9, row_id="row-3")


def test_the_largest_rewards_that_pass_leave_every_advantage_finite():
    # (1 − 1/3)·1e300, twice, and −4/3: with 1e308 the sum, and then the differences, overflowed.
    rewards = [1e300, 1e300, -1e300]
    assert group_credit(rewards, DR_GRPO) == pytest.approx([2e300 / 3, 2e300 / 3, -4e300 / 3])
    assert group_credit(rewards, GRPO) == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5])
    assert return_to_go_loo([[r] for r in rewards], 1.0)[0] == [1e300]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_a02_equal_returns_leave_exactly_nothing(reward, size):
    # The mean of three 0.1 is not 0.1 in floating point.
    assert return_to_go_loo([[reward]] * size, 0.9) == [[0.0]] * size
    assert return_to_go_loo([[0.0, reward]] * size, 0.9) == [[0.0, 0.0]] * size


def test_a04_one_scored_sample_has_no_baseline_in_any_turn():
    assert return_to_go_loo([[1.0, 2.0], None], 0.9) == [[0.0, 0.0], []]
    assert return_to_go_loo([[1.0]], 0.9) == [[0.0]]
    assert return_to_go_loo([], 0.9) == []


def test_normalise_advantages_counts_each_turn_once():
    # 1, 2, 3: mean 2, sample std 1 → −1, 0, 1 (eps 1e-6 moves the sixth digit)
    [[first], rest] = normalise_advantages([[1.0], [2.0, 3.0]])
    assert [first, *rest] == pytest.approx([-1, 0, 1], abs=2e-6)
    assert normalise_advantages([[0.1], [0.1, 0.1], []]) == [[0.0], [0.0, 0.0], []]
    assert normalise_advantages([]) == []
    assert normalise_advantages([[5.0]]) == [[0.0]]


# --- what must hold for any rewards ---

rewards_of_a_group = st.lists(st.none() | st.floats(-1e6, 1e6, width=32), max_size=9)
every_credit = pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO, "return_to_go"])


def credited(rewards, credit) -> list[float]:
    """One advantage a sample under any credit that compares a group."""
    if credit != "return_to_go":
        return group_credit(rewards, credit)
    turns = return_to_go_loo([None if r is None else [r] for r in rewards], 1.0)
    return [advantages[0] if advantages else 0.0 for advantages in turns]


def close(one, other, rewards) -> bool:
    size = max((abs(r) for r in rewards if r is not None), default=0.0)
    return one == pytest.approx(other, rel=1e-6, abs=1e-9 * (1 + size))


@every_credit
@settings(max_examples=60, deadline=None)
@given(rewards=rewards_of_a_group)
def test_a04_the_unscored_have_no_part_in_anything(credit, rewards):
    found = credited(rewards, credit)
    scored = [r for r in rewards if r is not None]
    assert len(found) == len(rewards)
    assert all(a == 0.0 for a, r in zip(found, rewards, strict=True) if r is None)
    assert [a for a, r in zip(found, rewards, strict=True) if r is not None] == credited(
        scored, credit
    )
    assert all(math.isfinite(a) for a in found)
    if len(scored) < 2 or min(scored) == max(scored):
        assert found == [0.0] * len(rewards)


@every_credit
@settings(max_examples=60, deadline=None)
@given(rewards=rewards_of_a_group, seed=st.randoms(use_true_random=False))
def test_credit_is_fair_and_the_order_does_not_matter(credit, rewards, seed):
    found = credited(rewards, credit)
    assert close(math.fsum(found), 0.0, rewards)
    order = list(range(len(rewards)))
    seed.shuffle(order)
    shuffled = credited([rewards[i] for i in order], credit)
    assert close(shuffled, [found[i] for i in order], rewards)
    for i, one in enumerate(rewards):
        for j, other in enumerate(rewards):
            if one is not None and other is not None and one > other:
                assert found[i] >= found[j] - 1e-9 * (1 + abs(one))


@settings(max_examples=60, deadline=None)
@given(rewards=rewards_of_a_group)
def test_rloo_is_dr_grpo_stretched_and_return_to_go_of_one_turn(rewards):
    scored = sum(r is not None for r in rewards)
    stretched = [a * scored / max(1, scored - 1) for a in group_credit(rewards, DR_GRPO)]
    assert close(group_credit(rewards, RLOO), stretched, rewards)
    assert close(credited(rewards, "return_to_go"), group_credit(rewards, RLOO), rewards)


@settings(max_examples=40, deadline=None)
@given(
    low=st.floats(-100, 100, width=32),
    gap_exponent=st.integers(-9, 3),
    wins=st.integers(1, 5),
    losses=st.integers(1, 5),
)
def test_a02_small_gaps_keep_their_scale(low, gap_exponent, wins, losses):
    # Two values, gap d: mean-centred d·losses/n and −d·wins/n, over s + eps with
    # s = d √(wins·losses/(n (n − 1))); whatever d is, no variance is floored away.
    gap, n = 10.0**gap_exponent, wins + losses
    high = low + gap
    gap = high - low  # as floating point holds it
    if gap == 0:
        return
    std = gap * math.sqrt(wins * losses / (n * (n - 1)))
    found = group_credit([high] * wins + [low] * losses, GRPO)
    assert found[0] == pytest.approx(gap * losses / n / (std + 1e-6), rel=1e-3)
    assert found[-1] == pytest.approx(-gap * wins / n / (std + 1e-6), rel=1e-3)


def _turn(start, end):
    return Turn(start, end, StopReason.END_OF_TURN, PolicyVersion(0, 0))
