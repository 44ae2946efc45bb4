"""Ask a model every problem, grade what it says. RL's own turn-and-tool loop and verifier.

Which tokens are drawn depends on the weights, the prompt and a seed made from
(`evaluation.sampling.seed`, row, sample): snapshot, policy and every quantisation meet the same
draws, so that their difference is theirs and not the dice's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from configs.schema.evaluation import EvaluationSampling
from tasks.artifacts import hash_bytes
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row
from tasks.environments.toolcall import Tool
from tasks.evaluation.types import AnswerRecord
from tasks.rewards.verdict import Outcome
from tasks.rewards.verifiers import stated_answer, verify
from tasks.sampling.episode import EpisodeTask, run_episodes
from tasks.sampling.types import Rollout, RolloutEngine, SamplingParams

EPISODES_AT_ONCE = 512
WORTH_CONFIRMING = 0.5
"""Share of drafts that must have been confirmed so far: below it playing at once is cheaper."""
Progress = Callable[[int, int], None]
"""Called with (episodes finished, episodes in all)."""


def answer_problems(
    engine: RolloutEngine,
    rows: Sequence[Row],
    renderer: PromptRenderer,
    tools: Mapping[str, Tool],
    sampling: EvaluationSampling,
    *,
    progress: Progress | None = None,
    at_once: int = EPISODES_AT_ONCE,
) -> list[AnswerRecord]:
    """`sampling.samples` graded answers to each row, rows in order, samples 0 … S−1 within.

    `at_once` episodes share the engine; with no more of them than it has sequences, one that keeps
    what it computed goes on with it in the next turn.
    """
    rollouts: list[Rollout] = []
    tasks = episode_tasks(rows, sampling)
    params = SamplingParams(sampling.temperature, sampling.max_new_tokens)
    for start in range(0, len(tasks), at_once):
        chunk = tasks[start : start + at_once]
        rollouts += run_episodes(
            engine, chunk, renderer, tools, max_turns=sampling.max_turns, params=params
        )
        if progress is not None:
            progress(len(rollouts), len(tasks))
    return _graded(rows, tasks, rollouts, sampling)


def _graded(
    rows: Sequence[Row],
    tasks: Sequence[EpisodeTask],
    rollouts: Sequence[Rollout],
    sampling: EvaluationSampling,
) -> list[AnswerRecord]:
    records: list[AnswerRecord] = []
    for index, row in enumerate(rows):
        first = index * sampling.samples
        seeds = [task.seed for task in tasks[first : first + sampling.samples]]
        records += grade(row, rollouts[first : first + sampling.samples], seeds)
    return records


class ConfirmingEngine(RolloutEngine, Protocol):
    """An engine that can say whether greedy decoding would have chosen given tokens."""

    def chooses(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[bool]]
    ) -> list[bool]:
        """Whether it would choose every sampled token of each sequence."""
        ...


Drafts = dict[str, Rollout]
"""Greedy episodes of a model much like this one, by rollout id."""


def answer_greedily(
    engine: ConfirmingEngine,
    rows: Sequence[Row],
    renderer: PromptRenderer,
    tools: Mapping[str, Tool],
    sampling: EvaluationSampling,
    *,
    progress: Progress | None = None,
    at_once: int = EPISODES_AT_ONCE,
    drafts: Drafts | None = None,
) -> list[AnswerRecord]:
    """One graded greedy answer to each row, rows in order.

    `drafts` hold what another model said to the same prompts, within the same limits: an episode
    in which this one would choose the very same tokens need not be played again, for all between
    them (prompt, tools, limits) is given. What is played although there is no draft is added.
    """
    greedy = sampling.model_copy(update={"temperature": 0.0, "samples": 1})
    params = SamplingParams(0.0, sampling.max_new_tokens)
    tasks = episode_tasks(rows, greedy)
    known = {} if drafts is None else drafts
    rollouts: list[Rollout] = []
    confirmed = tried = 0
    for start in range(0, len(tasks), at_once):
        chunk = tasks[start : start + at_once]
        drafted = [known[t.rollout_id] for t in chunk if t.rollout_id in known]
        found: dict[str, Rollout] = {}
        if drafted and confirmed >= WORTH_CONFIRMING * tried:
            agreed = engine.chooses(
                [r.token_ids for r in drafted], [r.action_mask for r in drafted]
            )
            found = {r.rollout_id: r for r, same in zip(drafted, agreed, strict=True) if same}
            confirmed, tried = confirmed + len(found), tried + len(drafted)
        left = [t for t in chunk if t.rollout_id not in found]
        played = run_episodes(
            engine, left, renderer, tools, max_turns=greedy.max_turns, params=params
        )
        found |= {r.rollout_id: r for r in played}
        rollouts += [found[t.rollout_id] for t in chunk]
        if drafts is not None:
            for rollout in played:
                drafts.setdefault(rollout.rollout_id, rollout)
        if progress is not None:
            progress(len(rollouts), len(tasks))
    return _graded(rows, tasks, rollouts, greedy)


def episode_tasks(rows: Sequence[Row], sampling: EvaluationSampling) -> list[EpisodeTask]:
    """One episode for each row and sample."""
    return [
        EpisodeTask(
            rollout_id=f"{row.id}/{sample}",
            row_id=row.id,
            group_id=row.id,
            messages=({"role": "user", "content": row.prompt},),
            seed=answer_seed(sampling.seed, row.id, sample),
        )
        for row in rows
        for sample in range(sampling.samples)
    ]


def answer_seed(seed: int, row_id: str, sample: int) -> int:
    """Seed of one episode, 60 bits; no model, order or subset of problems enters."""
    return int(hash_bytes(f"{seed}/{row_id}/{sample}".encode())[:15], 16)


def grade(row: Row, rollouts: Sequence[Rollout], seeds: Sequence[int]) -> list[AnswerRecord]:
    """Grade all samples of one problem, and give answers that are equal the same form."""
    records: list[AnswerRecord] = []
    forms: list[str] = []
    for sample, (rollout, seed) in enumerate(zip(rollouts, seeds, strict=True)):
        verdict = verify(
            row.answer_kind, row.answer, rollout.final_text, truncated=rollout.truncated
        )
        extracted = verdict.extracted
        if extracted is None and verdict.outcome is Outcome.UNSCORED and not rollout.truncated:
            extracted = stated_answer(row.answer_kind, rollout.final_text)  # the gold is at fault
        records.append(
            AnswerRecord(
                row_id=row.id,
                sample=sample,
                band=row.band,
                seed=seed,
                outcome=verdict.outcome,
                gold=row.answer,
                extracted=extracted,
                normalised=_form(row.answer_kind, extracted, forms),
                reason=verdict.reason,
                tokens=rollout.sampled_tokens,
                turns=len(rollout.turns),
                truncated=rollout.truncated,
                tool_calls=rollout.tool_calls,
                tool_errors=rollout.tool_errors,
                messages=rollout.messages,
            )
        )
    return records


def _form(answer_kind: str, extracted: str | None, forms: list[str]) -> str | None:
    """The earlier answer the verifier holds equal to this one, else this one, which is kept.

    So `29`, `29.00` and `$29` are one answer, by the same rule that grades them.
    """
    if extracted is None:
        return None
    for form in forms:
        if same_answer(answer_kind, form, extracted):
            return form
    forms.append(extracted)
    return extracted


def same_answer(answer_kind: str, first: str, second: str) -> bool:
    """Whether the verifier would take `second` for `first`."""
    if first == second:
        return True
    return verify(answer_kind, first, rf"\boxed{{{second}}}").outcome is Outcome.CORRECT
