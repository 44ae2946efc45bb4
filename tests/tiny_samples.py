"""A batch as the loop keeps it: samples that say given things, graded and credited."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.schema import PipelineConfig
from configs.schema.rl import RLConfig
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row
from tasks.rl.grader import Grader, weigh
from tasks.rl.sample_log import TrainedSamples, credited
from tasks.rl.types import Group
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn

VERSION = PolicyVersion(0, 3)
ROWS = {"r": Row(id="r", prompt="1+1", answer="2", source="test")}


def rl_config(**rl: Any) -> RLConfig:
    """Defaults but for what is given."""
    return PipelineConfig.model_validate({"profile": "test", "rl": rl}).rl


def rollout(
    renderer: PromptRenderer, name: str, said: Sequence[str], *, cut: bool = False
) -> Rollout:
    """An episode whose policy says these things, one a turn."""
    ids = renderer.prompt_ids([{"role": "user", "content": "1+1"}])
    mask = [False] * len(ids)
    turns = []
    for number, text in enumerate(said):
        closed = not (cut and number == len(said) - 1)
        own = [*renderer.encode(text), *([renderer.end_of_turn_id] if closed else [])]
        stop = StopReason.END_OF_TURN if closed else StopReason.MAX_TOKENS
        turns.append(Turn(len(ids), len(ids) + len(own), stop, VERSION))
        ids, mask = [*ids, *own], [*mask, *[True] * len(own)]
    messages = tuple({"role": "assistant", "content": text} for text in said)
    return Rollout(
        name, "r", "7", tuple(ids), tuple(mask), tuple(-0.5 * m for m in mask), tuple(turns), 1.0,
        messages, said[-1], cut,
    )  # fmt: skip


def trained_samples(renderer: PromptRenderer) -> TrainedSamples:
    """Right; wrong; right with a broken tool call before; cut off. Kept as the loop keeps them:
    graded, weighed at step 5, the conversation of the first alone."""
    config = rl_config()
    said = [["2"], ["3"], ["<tool>calc(", "2"], ["2"]]
    rollouts = [rollout(renderer, f"7.0.{i}", s, cut=i == 3) for i, s in enumerate(said)]
    graded = weigh([Grader(ROWS).grade(r) for r in rollouts], config.reward, 5)
    light = [
        s if i == 0 else replace(s, rollout=replace(s.rollout, messages=()))
        for i, s in enumerate(graded)
    ]
    group = Group("7", "r", tuple(light))
    return TrainedSamples(5, (group,), credited([group], config))
