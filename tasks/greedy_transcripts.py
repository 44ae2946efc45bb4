"""Greedy answers with everything said and every id, for `quantize.side_by_side`.

The same loop, order of problems and verifier as `tasks.greedy_answers`, so that what is shown is
what was counted there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.schema import PipelineConfig
from quantize.rollouts import RolloutTokens
from quantize.side_by_side import Played
from tasks.artifacts import ArtifactRecord
from tasks.environments.row import Row, read_rows
from tasks.evaluation.selection import stratified
from tasks.evaluation.types import AnswerRecord, ServedModel
from tasks.sampling.types import Rollout

Progress = Callable[[Path], None]


def greedy_transcripts(
    model: ServedModel,
    rows: Sequence[Row],
    *,
    parallel: int,
    threads: int,
    progress: Progress | None = None,
) -> Callable[[Path, Sequence[int]], list[Played]]:
    """A function `(GGUF file, places in rows)` → its graded greedy answers to those rows.

    `model` says how it is served; the file it names is replaced by the one given.
    """

    def play(gguf: Path, places: Sequence[int]) -> list[Played]:
        if progress is not None:
            progress(gguf)
        asked = [rows[place] for place in places]
        return _play(replace(model, gguf=gguf), asked, parallel, threads)

    return play


def transcripts_of_run(
    config: PipelineConfig, inputs: Mapping[str, ArtifactRecord], threads: int
) -> Callable[[Path, Sequence[int]], list[Played]]:
    """`greedy_transcripts` over the problems whose answers the quantise stage counts."""
    policy = inputs["rl"].path / "policy"

    def play(gguf: Path, places: Sequence[int]) -> list[Played]:
        heldout = read_rows(inputs["data"].path / "heldout.jsonl")
        rows = stratified(heldout, config.quantize.accuracy_problems)
        model = ServedModel(
            gguf, policy, config.system_prompt, config.tools, config.evaluation.sampling
        )
        parallel = config.quantize.parallel_sequences
        return greedy_transcripts(model, rows, parallel=parallel, threads=threads)(gguf, places)

    return play


def _play(model: ServedModel, rows: Sequence[Row], parallel: int, threads: int) -> list[Played]:
    from tasks.environments import tools_named
    from tasks.environments.renderer import PromptRenderer
    from tasks.evaluation.answers import episode_tasks, grade
    from tasks.greedy_answers import context_needed
    from tasks.models.load import load_tokenizer
    from tasks.sampling.episode import run_episodes
    from tasks.sampling.llama_cpp_engine import LlamaCppEngine
    from tasks.sampling.types import SamplingParams

    renderer = PromptRenderer(load_tokenizer(model.tokenizer), model.system_prompt)
    greedy = model.sampling.model_copy(update={"temperature": 0.0, "samples": 1})
    with LlamaCppEngine(
        model.gguf,
        n_ctx_per_seq=context_needed(rows, renderer, greedy),
        parallel_sequences=min(parallel, len(rows)),
        threads=threads,
        end_of_turn_ids=(renderer.end_of_turn_id,),
    ) as engine:
        rollouts = run_episodes(
            engine,
            episode_tasks(rows, greedy),
            renderer,
            tools_named(model.tools),
            max_turns=greedy.max_turns,
            params=SamplingParams(0.0, greedy.max_new_tokens),
        )
    return [
        _played(rollout, grade(row, [rollout], [0])[0])
        for row, rollout in zip(rows, rollouts, strict=True)
    ]


def _played(rollout: Rollout, record: AnswerRecord) -> Played:
    return Played(
        row_id=record.row_id,
        band=record.band,
        gold=record.gold,
        correct=record.outcome.value == "correct",
        outcome=record.outcome.value,
        extracted=record.extracted,
        messages=record.messages,
        tokens=RolloutTokens(rollout.token_ids, rollout.action_mask),
    )
