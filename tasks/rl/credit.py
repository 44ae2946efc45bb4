"""Credit assignment: rewards to advantages, as pure functions in float64.

G samples of one prompt, K turns of one episode, T tokens. A reward of None is an answer nobody
could score: it stays out of every statistic and earns an advantage of exactly 0. A NaN or infinite
reward, or one beyond 1e300, is a fault of the grader and an error here.
"""

import math
from collections.abc import Sequence

from configs.schema.rl_credit import DrGrpoCredit, GroupCredit, GrpoCredit
from tasks.sampling.types import Turn

LARGEST = 1e300
"""Beyond it, sums over a group would be infinite."""


class NonFiniteRewardError(ValueError):
    """A reward is NaN, infinite or as good as infinite; `row_id`, `of` and `index` say whose."""

    def __init__(self, row_id: str, index: int, value: float, of: str = "sample") -> None:
        super().__init__(row_id, index, value, of)
        self.row_id, self.index, self.value, self.of = row_id, index, value, of

    def __str__(self) -> str:
        return (
            f"reward of row {self.row_id!r}, {self.of} {self.index}, is {self.value}; expected a "
            f"finite number within ±{LARGEST:g}, or None where the answer cannot be scored: fix "
            "the grader"
        )


class TurnShapeError(ValueError):
    """Turn rewards, values, advantages and spans do not fit together."""


def require_finite(rewards: Sequence[float | None], row_id: str = "", of: str = "sample") -> None:
    """Raise NonFiniteRewardError at the first reward that is NaN or beyond ±1e300.

    `of` says what the rewards are one each of.
    """
    for index, reward in enumerate(rewards):
        if reward is not None and not abs(float(reward)) <= LARGEST:  # NaN fails this too
            raise NonFiniteRewardError(row_id, index, float(reward), of)


def scored_mean(values: Sequence[float | None]) -> float | None:
    """Mean of what was scored, for logs: None and NaN stay out; None where nothing is left."""
    scored = [float(v) for v in values if v is not None and not math.isnan(v)]
    return math.fsum(scored) / len(scored) if scored else None


def centre_and_scale(values: Sequence[float], eps: float) -> list[float]:
    """(x − mean) / (s + eps), s the sample standard deviation (n − 1).

    Exactly 0.0 for every member where all are equal or fewer than two are given.
    """
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    centred = _centre(values)
    # hypot keeps tiny and huge deviations alike from under- or overflowing when squared.
    sample_std = math.hypot(*centred) / math.sqrt(len(values) - 1)
    return [c / (sample_std + eps) for c in centred]


def group_credit(
    rewards: Sequence[float | None], credit: GroupCredit, *, row_id: str = ""
) -> list[float]:
    """Advantage of each sample against its group.

    GRPO (arXiv 2402.03300): (R − mean) / (s + eps), s the *sample* standard deviation (n − 1).
    Dr. GRPO (arXiv 2503.20783): R − mean. RLOO (arXiv 2402.14740): R − mean of the others, which
    is Dr. GRPO's times n / (n − 1). All over scored members only.

    Args:
        rewards: (G,); None = unscored.
        row_id: names the prompt in an error.

    Returns:
        (G,); exactly 0.0 for unscored members, for all-equal rewards, and for all members where
        fewer than two are scored.

    Raises:
        NonFiniteRewardError: a reward is NaN or beyond ±1e300.
    """
    require_finite(rewards, row_id)
    scored = [float(r) for r in rewards if r is not None]
    if isinstance(credit, GrpoCredit):
        advantages = iter(centre_and_scale(scored, credit.eps))
    elif len(scored) < 2 or min(scored) == max(scored):
        advantages = iter([0.0] * len(scored))
    elif isinstance(credit, DrGrpoCredit):
        advantages = iter(_centre(scored))
    else:
        others = len(scored) / (len(scored) - 1)
        advantages = iter([c * others for c in _centre(scored)])
    return [0.0 if r is None else next(advantages) for r in rewards]


def turn_gae(
    turn_rewards_K: Sequence[float],
    values_K: Sequence[float],
    bootstrap_value: float,
    gamma: float,
    lam: float,
    *,
    row_id: str = "",
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation over turns (arXiv 1506.02438, one step = one turn).

    δ_k = r_k + γ V_{k+1} − V_k and A_k = δ_k + γ λ A_{k+1}; the value target is A_k + V_k. Turns
    are discounted, tokens are not, and observations between turns cost nothing.

    Args:
        turn_rewards_K: reward of each turn; the outcome falls on the last.
        values_K: V at the last observation token before each turn.
        bootstrap_value: V_K: 0.0 where the episode ended, the critic's value where it was cut off.
        row_id: names the prompt in an error.

    Returns:
        (advantages_K, returns_K).

    Raises:
        NonFiniteRewardError: a reward is NaN or beyond ±1e300.
        TurnShapeError: not one reward and one value a turn.
    """
    if len(turn_rewards_K) != len(values_K):
        raise TurnShapeError(
            f"{len(turn_rewards_K)} turn rewards, {len(values_K)} values; expected one each a turn"
        )
    require_finite(turn_rewards_K, row_id, "turn")
    advantages = [0.0] * len(values_K)
    next_value, next_advantage = bootstrap_value, 0.0
    for k in reversed(range(len(values_K))):
        delta = turn_rewards_K[k] + gamma * next_value - values_K[k]
        next_advantage = advantages[k] = delta + gamma * lam * next_advantage
        next_value = values_K[k]
    return advantages, [a + v for a, v in zip(advantages, values_K, strict=True)]


def return_to_go(turn_rewards_K: Sequence[float], gamma: float) -> list[float]:
    """G_k = r_k + γ G_{k+1}: what each turn still earned, discounted per turn."""
    returns, later = [0.0] * len(turn_rewards_K), 0.0
    for k in reversed(range(len(turn_rewards_K))):
        later = returns[k] = turn_rewards_K[k] + gamma * later
    return returns


def return_to_go_loo(
    turn_rewards_G: Sequence[Sequence[float] | None], gamma: float, *, row_id: str = ""
) -> list[list[float]]:
    """Discounted return-to-go minus one leave-one-out baseline, for each turn of each sample.

    A_{i,k} = G_{i,k} − mean of G_{j,k} over the peers j ≠ i that reached turn k. The baseline does
    not depend on sample i, so the gradient stays unbiased; subtracting a baseline from each turn's
    reward instead would charge a policy for every extra turn it chooses to take. A turn no scored
    peer reached has no baseline and keeps G_{i,k}; where fewer than two samples are scored, all is
    0. With one turn each this is RLOO (arXiv 2402.14740).

    Args:
        turn_rewards_G: one reward a turn, samples of unequal length; None = unscored sample.

    Returns:
        One list a sample, as long as its turns; empty for an unscored sample.
    """
    for sample, rewards in enumerate(turn_rewards_G):
        require_finite(rewards or (), row_id, f"sample {sample}, turn")
    returns = [None if r is None else return_to_go(r, gamma) for r in turn_rewards_G]
    if sum(r is not None for r in returns) < 2:
        return [[0.0] * len(own or ()) for own in returns]
    return [
        [] if own is None else [g - _peer_mean(returns, sample, turn) for turn, g in enumerate(own)]
        for sample, own in enumerate(returns)
    ]


def broadcast_turns(values_K: Sequence[float], turns: Sequence[Turn], length: int) -> list[float]:
    """Give every token of a turn that turn's value; 0.0 on prompt and observation tokens.

    Returns:
        (length,).

    Raises:
        TurnShapeError: not one value a turn, or spans that overlap or leave the sequence.
    """
    if len(values_K) != len(turns):
        raise TurnShapeError(f"{len(values_K)} values for {len(turns)} turns; expected one each")
    tokens, position = [0.0] * length, 0
    for value, turn in zip(values_K, turns, strict=True):
        if not position <= turn.start <= turn.end <= length:
            raise TurnShapeError(
                f"turn [{turn.start}, {turn.end}) must lie within [{position}, {length}): turns "
                "are in order, apart, and inside the sequence"
            )
        tokens[turn.start : turn.end] = [value] * (turn.end - turn.start)
        position = turn.end
    return tokens


def normalise_advantages(
    advantages_B_K: Sequence[Sequence[float]], eps: float = 1e-6
) -> list[list[float]]:
    """Centre and scale over all turns of the batch: each turn counts once, however long.

    Uses the sample standard deviation (n − 1); all-equal advantages become exactly 0.0.
    """
    scaled = iter(centre_and_scale([a for row in advantages_B_K for a in row], eps))
    return [[next(scaled) for _ in row] for row in advantages_B_K]


def _centre(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [v - mean for v in values]


def _peer_mean(returns: Sequence[Sequence[float] | None], sample: int, turn: int) -> float:
    peers = [
        g[turn] for j, g in enumerate(returns) if j != sample and g is not None and turn < len(g)
    ]
    if not peers:
        return 0.0
    # 0.1 + 0.1 + 0.1 is not 3 × 0.1: returns that agree must leave an advantage of exactly 0.
    return peers[0] if min(peers) == max(peers) else math.fsum(peers) / len(peers)
