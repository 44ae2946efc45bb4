"""The one turn-and-tool loop: RL, evaluation and parity sample episodes with it.

The device runs the same protocol (`tasks/environments/toolcall.py`) over text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.artifacts.content_hash import hash_bytes
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Message
from tasks.environments.toolcall import Tool, answer_tool_call
from tasks.sampling.types import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutEngine,
    SamplingParams,
    StopReason,
    Turn,
)


@dataclass(frozen=True)
class EpisodeTask:
    """One episode to play."""

    rollout_id: str
    row_id: str
    group_id: str
    messages: tuple[Message, ...]
    """The conversation so far; the system prompt is added by the renderer."""
    seed: int


@dataclass
class _Episode:
    """An episode being played."""

    task: EpisodeTask
    messages: list[Message]
    token_ids: list[int]
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    final_text: str = ""
    tool_calls: int = 0
    tool_errors: int = 0
    done: bool = False
    outgrown: bool = False
    """The context has no room for the answer of a tool."""

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens the policy did not sample."""
        self.token_ids.extend(ids)
        self.action_mask.extend([False] * len(ids))
        self.logprobs.extend([0.0] * len(ids))

    def act(self, completion: Completion) -> None:
        """Append a sampled turn."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids)
        self.action_mask.extend([True] * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        self.turns.append(
            Turn(start, len(self.token_ids), completion.stop_reason, completion.policy_version)
        )

    @property
    def truncated(self) -> bool:
        """Whether the last turn was cut off, or the context was full before the next one."""
        return self.outgrown or self.turns[-1].stop_reason is not StopReason.END_OF_TURN


def turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn, 63 bits, independent of Python's hash seed."""
    return int(hash_bytes(f"{seed}/{turn}".encode())[:15], 16)


def run_episodes(
    engine: RolloutEngine,
    tasks: Sequence[EpisodeTask],
    renderer: PromptRenderer,
    tools: Mapping[str, Tool],
    *,
    max_turns: int,
    params: SamplingParams,
) -> list[Rollout]:
    """Play every task to its end, a turn of all unfinished episodes at a time.

    Token ids are the engine's own: sampled spans are never rendered and tokenised again.
    """
    prompts: dict[str, list[int]] = {}
    episodes = []
    for task in tasks:
        key = repr(task.messages)  # a group shares its prompt: rendered once
        if key not in prompts:
            prompts[key] = renderer.prompt_ids(task.messages)
        episode = _Episode(task, list(task.messages), [])
        episode.observe(prompts[key])
        episodes.append(episode)
    for turn in range(max_turns):
        playing = [e for e in episodes if not e.done]
        if not playing:
            break
        requests = [
            GenerateRequest(
                e.task.rollout_id, tuple(e.token_ids), params, turn_seed(e.task.seed, turn)
            )
            for e in playing
        ]
        last = turn == max_turns - 1
        for episode, completion in zip(playing, engine.generate(requests), strict=True):
            _advance(episode, completion, renderer, tools, engine.max_length, last=last)
    return [_rollout(e, params.temperature) for e in episodes]


def _advance(
    episode: _Episode,
    completion: Completion,
    renderer: PromptRenderer,
    tools: Mapping[str, Tool],
    max_length: int,
    *,
    last: bool,
) -> None:
    """Take one sampled turn: end the episode, or answer its tool call and open the next turn."""
    episode.act(completion)
    ids = completion.token_ids
    if completion.stop_reason is StopReason.END_OF_TURN:
        ids = ids[:-1]
    text = renderer.decode(ids)
    episode.messages.append({"role": "assistant", "content": text})
    episode.final_text = text
    observation = None if episode.truncated else answer_tool_call(text, tools)
    if observation is None:
        episode.done = True
        return
    episode.tool_calls += 1
    episode.tool_errors += observation.startswith("error:")
    if last:
        episode.done = True
        return
    message = {"role": "tool", "content": observation}
    observed = renderer.observation_ids(episode.messages, [message])
    if len(episode.token_ids) + len(observed) >= max_length:
        episode.done = episode.outgrown = True
        return
    episode.observe(observed)
    episode.messages.append(message)


def _rollout(episode: _Episode, temperature: float) -> Rollout:
    return Rollout(
        rollout_id=episode.task.rollout_id,
        row_id=episode.task.row_id,
        group_id=episode.task.group_id,
        token_ids=tuple(episode.token_ids),
        action_mask=tuple(episode.action_mask),
        sampler_logprobs=tuple(episode.logprobs),
        turns=tuple(episode.turns),
        temperature=temperature,
        messages=tuple(episode.messages),
        final_text=episode.final_text,
        truncated=episode.truncated,
        tool_calls=episode.tool_calls,
        tool_errors=episode.tool_errors,
    )
