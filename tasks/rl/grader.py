"""Rewards of a rollout: what the verifier says, and parts that are weighted later."""

from collections.abc import Mapping, Sequence

from configs.schema.rl import OverlongPenalty, RewardConfig
from tasks.environments.row import Row
from tasks.environments.toolcall import MalformedCall, parse_tool_call
from tasks.rewards.probes import known_answer_probes
from tasks.rewards.verdict import Outcome, Verdict
from tasks.rewards.verifiers import verify
from tasks.rl.controllers import linear_anneal
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import ScoredRollout
from tasks.sampling.types import Rollout


class Grader:
    """Grades rollouts of the rows it knows; the verifier is the one evaluation uses."""

    def __init__(self, rows: Mapping[str, Row], reward: RewardConfig | None = None) -> None:
        """Without `reward` its defaults hold."""
        self._rows = rows
        self._overlong = (reward or RewardConfig()).overlong

    def grade(self, rollout: Rollout) -> ScoredRollout:
        """Outcome (None = unscorable) and components; weights come in `weigh`."""
        row = self._rows[rollout.row_id]
        verdict = verify(
            row.answer_kind, row.answer, rollout.final_text, truncated=rollout.truncated
        )
        components = {"format": _well_formed(rollout, verdict)}
        if self._overlong is not None:
            components["overlong"] = overlong(rollout.sampled_tokens, self._overlong)
        return ScoredRollout(
            rollout=rollout, reward=None, outcome=verdict.score, components=components
        )

    def probes(self) -> list[ProbeResult]:
        """Have the verifier answer questions whose answers are known, for every kind in use."""
        results = []
        for kind in sorted({row.answer_kind for row in self._rows.values()}):
            for i, (gold, prediction, expected) in enumerate(known_answer_probes(kind)):
                right = Verdict(expected).score
                score = verify(kind, gold, prediction).score
                results.append(ProbeResult(f"{kind}-{i}", right, score))
        return results


def _well_formed(rollout: Rollout, verdict: Verdict) -> float:
    """1.0 for an answer that is there, whole, and not a broken tool call."""
    malformed = any(
        isinstance(parse_tool_call(m["content"]), MalformedCall)
        for m in rollout.messages
        if m["role"] == "assistant"
    )
    answered = verdict.outcome in (Outcome.CORRECT, Outcome.WRONG)
    return float(answered and not rollout.truncated and not malformed)


def overlong(tokens: int, config: OverlongPenalty) -> float:
    """0 up to the expected length, falling to −1 at the cut-off and beyond, before weighting."""
    over = (tokens - config.expected_tokens) / (config.cutoff_tokens - config.expected_tokens)
    return -min(1.0, max(0.0, over))


def weigh(scored: Sequence[ScoredRollout], config: RewardConfig, step: int) -> list[ScoredRollout]:
    """Rewards at optimiser step `step`: outcome plus the annealed format part, less what an
    overlong answer costs, on the last turn.

    An unscored outcome leaves the reward None.
    """
    format_weight = linear_anneal(config.format, step)
    weighed = []
    for sample in scored:
        reward = None
        turns = [0.0] * len(sample.rollout.turns)
        if sample.outcome is not None:
            reward = config.outcome * sample.outcome + format_weight * sample.components["format"]
            if config.overlong is not None:
                reward += config.overlong.factor * sample.components["overlong"]
            turns[-1] = reward
        weighed.append(
            ScoredRollout(sample.rollout, reward, sample.outcome, sample.components, tuple(turns))
        )
    return weighed
