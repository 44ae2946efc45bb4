"""The one turn-and-tool loop: RL, evaluation and parity sample episodes with it.

The device runs the same protocol (`tasks/environments/toolcall.py`) over text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.artifacts.content_hash import hash_bytes
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Message
from tasks.environments.tool_runner import ToolAnswer, ToolRequest, ToolRunner
from tasks.environments.toolcall import Tool
from tasks.sampling.answers import checked, one_each
from tasks.sampling.types import (
    AsyncRolloutEngine,
    Completion,
    GenerateRequest,
    PolicyVersion,
    Rollout,
    RolloutEngine,
    SamplingParams,
    StopReason,
    Turn,
    VersionSpan,
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
    tool_timeouts: int = 0
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
        spans = tuple(VersionSpan(start + a, start + b, v) for a, b, v in completion.spans)
        self.turns.append(
            Turn(
                start,
                len(self.token_ids),
                completion.stop_reason,
                completion.policy_version,
                spans,
            )
        )

    def request(self, params: SamplingParams, version: PolicyVersion | None) -> GenerateRequest:
        """Ask for the next turn."""
        seed = turn_seed(self.task.seed, len(self.turns))
        return GenerateRequest(self.task.rollout_id, tuple(self.token_ids), params, seed, version)

    def say(self, completion: Completion, renderer: PromptRenderer) -> ToolRequest | None:
        """Take one sampled turn; what it may ask of a tool, None where it was cut off."""
        self.act(completion)
        ids = completion.token_ids
        if completion.stop_reason is StopReason.END_OF_TURN:
            ids = ids[:-1]
        self.final_text = renderer.decode(ids)
        self.messages.append({"role": "assistant", "content": self.final_text})
        if self.truncated:
            return None
        return ToolRequest(self.final_text, f"{self.task.seed}/{len(self.turns)}")

    def hear(
        self, answer: ToolAnswer | None, renderer: PromptRenderer, max_length: int, *, last: bool
    ) -> None:
        """End the episode, or take the answer of a tool and open the next turn."""
        if answer is None:
            self.done = True
            return
        self.tool_calls += 1
        self.tool_errors += answer.is_error
        self.tool_timeouts += answer.timeouts > 0 and answer.is_error
        if last:
            self.done = True
            return
        message: Message = {"role": "tool", "content": answer.text}
        observed = renderer.observation_ids(self.messages, [message])
        if len(self.token_ids) + len(observed) >= max_length:
            self.done = self.outgrown = True
            return
        self.observe(observed)
        self.messages.append(message)

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
    tools: ToolRunner | Mapping[str, Tool],
    *,
    max_turns: int,
    params: SamplingParams,
) -> list[Rollout]:
    """Play every task to its end in lockstep: a turn of all unfinished episodes at a time, then
    all their tool calls. The same tasks give the same rollouts, bit for bit.

    Token ids are the engine's own: sampled spans are never rendered and tokenised again. A mapping
    of tools is called under the default limits.

    Raises:
        SamplingError: the engine refused, or its answers cannot be trained on.
    """
    runner = tools if isinstance(tools, ToolRunner) else ToolRunner(tools)
    episodes = _begun(tasks, renderer)
    for turn in range(max_turns):
        playing = [e for e in episodes if not e.done]
        if not playing:
            break
        requests = [e.request(params, None) for e in playing]
        completions = one_each(requests, engine.generate(requests))
        said = [
            episode.say(checked(request, completion, None), renderer)
            for episode, request, completion in zip(playing, requests, completions, strict=True)
        ]
        answers = iter(runner.answer_all([request for request in said if request is not None]))
        for episode, request in zip(playing, said, strict=True):
            answer = None if request is None else next(answers)
            episode.hear(answer, renderer, engine.max_length, last=turn == max_turns - 1)
    return [_rollout(e, params.temperature) for e in episodes]


async def play_episode(
    engine: AsyncRolloutEngine,
    task: EpisodeTask,
    renderer: PromptRenderer,
    tools: ToolRunner,
    *,
    max_turns: int,
    params: SamplingParams,
    version: PolicyVersion | None = None,
) -> Rollout:
    """Play one task to its end; it waits for its own turns and tools only.

    Args:
        version: the version every turn must come from; None takes each turn from the newest.

    Raises:
        SamplingError: the engine refused, or its answer cannot be trained on.
    """
    (episode,) = _begun([task], renderer)
    for turn in range(max_turns):
        request = episode.say(await engine.complete(episode.request(params, version)), renderer)
        answer = None if request is None else await tools.answer(request)
        episode.hear(answer, renderer, engine.max_length, last=turn == max_turns - 1)
        if episode.done:
            break
    return _rollout(episode, params.temperature)


def _begun(tasks: Sequence[EpisodeTask], renderer: PromptRenderer) -> list[_Episode]:
    """Episodes with their prompts; a group shares its prompt, which is rendered once."""
    prompts: dict[str, list[int]] = {}
    episodes = []
    for task in tasks:
        key = repr(task.messages)
        if key not in prompts:
            prompts[key] = renderer.prompt_ids(task.messages)
        episode = _Episode(task, list(task.messages), [])
        episode.observe(prompts[key])
        episodes.append(episode)
    return episodes


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
        tool_timeouts=episode.tool_timeouts,
    )
