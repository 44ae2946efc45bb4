"""Rewards and advantages of a finished run, made again by the code, and the config, of now."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from configs.schema.rl import RLConfig
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row
from tasks.rl.errors import ReplayError
from tasks.rl.grader import Grader, weigh
from tasks.rl.sample_log import TrainedSamples, credited
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import Rollout, StopReason

SAME = 1e-6
"""Floats closer than this are the same reward or advantage."""


@dataclass(frozen=True)
class Replayed:
    """One sample then and now; None = unscorable, or not to be told."""

    batch: int
    rollout_id: str
    row_id: str
    text: str
    """The last assistant message."""
    outcome_then: float | None
    outcome_now: float | None
    reward_then: float | None
    reward_now: float | None
    advantages_then: tuple[float, ...] | None
    """One for each turn."""
    advantages_now: tuple[float, ...] | None

    @property
    def outcome_differs(self) -> bool:
        """Whether the verifier judges otherwise."""
        return self.outcome_then != self.outcome_now

    @property
    def reward_differs(self) -> bool:
        """Whether the sample earns something else."""
        return not _same(self.reward_then, self.reward_now)

    @property
    def advantages_differ(self) -> bool:
        """Whether the sample would be pushed otherwise; never where one side is not known."""
        then, now = self.advantages_then, self.advantages_now
        if then is None or now is None:
            return False
        return len(then) != len(now) or not all(map(_same, then, now))


def _same(then: float | None, now: float | None) -> bool:
    if then is None or now is None:
        return then is now
    return abs(then - now) <= SAME


class Replayer:
    """Grades logged samples again with the verifier, reward weights and credit of now."""

    def __init__(self, config: RLConfig, rows: Mapping[str, Row], renderer: PromptRenderer) -> None:
        self._config, self._rows, self._renderer = config, rows, renderer
        self._grader = Grader(rows, config.reward)

    def replay(self, batch: int, samples: TrainedSamples) -> Iterator[Replayed]:
        """One batch, sample by sample.

        Raises:
            ReplayError: the data no longer has a row that was trained on.
        """
        now = [self._graded(group, samples.began_at) for group in samples.groups]
        advantages = credited(now, self._config)
        for old, new in zip(samples.groups, now, strict=True):
            for then, again in zip(old.rollouts, new.rollouts, strict=True):
                name = then.rollout.rollout_id
                yield Replayed(
                    batch, name, old.row_id, then.rollout.final_text,
                    then.outcome, again.outcome, then.reward, again.reward,
                    samples.advantages.get(name), advantages.get(name),
                )  # fmt: skip

    def _graded(self, group: Group, step: int) -> Group:
        if group.row_id not in self._rows:
            raise ReplayError(
                f"row {group.row_id} was trained on and is not among the run's training rows now: "
                "its dataset was changed; replay needs the data stage as it was"
            )
        graded: list[ScoredRollout] = [
            self._grader.grade(_spoken(scored.rollout, self._renderer)) for scored in group.rollouts
        ]
        return replace(group, rollouts=tuple(weigh(graded, self._config.reward, step)))


def _spoken(rollout: Rollout, renderer: PromptRenderer) -> Rollout:
    """The rollout with what its policy said as messages: the log keeps a group's first alone."""
    said = []
    for turn in rollout.turns:
        closed = turn.stop_reason is StopReason.END_OF_TURN
        ids = rollout.token_ids[turn.start : turn.end - closed]
        said.append({"role": "assistant", "content": renderer.decode(ids)})
    return replace(rollout, messages=tuple(said))
