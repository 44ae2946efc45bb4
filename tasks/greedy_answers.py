"""How a GGUF file is judged: held-out problems, answered greedily through llama.cpp.

The same turn-and-tool loop and verifier as training and evaluation; only the engine differs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import PipelineConfig
from configs.schema.evaluation import EvaluationSampling
from tasks.artifacts import ArtifactRecord
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row, read_rows
from tasks.evaluation.types import AnswerRecord, ServedModel

if TYPE_CHECKING:
    import numpy as np

    from tasks.evaluation.answers import Drafts

OBSERVATION_TOKENS = 128
"""Room for one tool answer and the template around it."""


def answer_as_served(
    model: ServedModel,
    rows: Sequence[Row],
    progress: Callable[[int, int], None] | None = None,
    *,
    parallel: int,
    threads: int,
    drafts: "Drafts | None" = None,
) -> list[AnswerRecord]:
    """The model's graded answers to `rows`, in their order, through llama.cpp.

    `drafts`: see `tasks.evaluation.answers.answer_greedily`; the answers are the same without.
    """
    from tasks.environments import tools_named
    from tasks.evaluation.answers import answer_greedily
    from tasks.models.load import load_tokenizer
    from tasks.sampling.llama_cpp_engine import LlamaCppEngine

    renderer = PromptRenderer(load_tokenizer(model.tokenizer), model.system_prompt)
    with LlamaCppEngine(
        model.gguf,
        n_ctx_per_seq=context_needed(rows, renderer, model.sampling),
        parallel_sequences=min(parallel, len(rows)),
        threads=threads,
        end_of_turn_ids=(renderer.end_of_turn_id,),
    ) as engine:
        tools = tools_named(model.tools)
        return answer_greedily(
            engine,
            rows,
            renderer,
            tools,
            model.sampling,
            progress=progress,
            at_once=parallel,
            drafts=drafts,
        )


def greedy_answers(
    config: PipelineConfig, inputs: Mapping[str, ArtifactRecord], threads: int
) -> "Callable[[Path, int], np.ndarray]":
    """A function `(GGUF file, n)` → 1.0 or 0.0 for each of n held-out problems, in one order.

    What the first file says serves as a draft for the later ones, its quantisations.
    """
    drafts: Drafts = {}

    def answer(gguf: Path, count: int) -> "np.ndarray":
        from tasks.evaluation.metrics import correctness
        from tasks.evaluation.selection import stratified

        rows = stratified(read_rows(inputs["data"].path / "heldout.jsonl"), count)
        model = ServedModel(
            gguf,
            inputs["rl"].path / "policy",
            config.system_prompt,
            config.tools,
            config.evaluation.sampling,
        )
        parallel = config.quantize.parallel_sequences
        answers = answer_as_served(model, rows, parallel=parallel, threads=threads, drafts=drafts)
        return correctness(answers)[:, 0]

    return answer


def context_needed(
    rows: Sequence[Row], renderer: PromptRenderer, sampling: EvaluationSampling
) -> int:
    """Tokens the longest episode can take: prompt, every turn at its limit, tool answers between.

    The cache holds this for every parallel sequence, so the model's whole context would be waste.
    """
    longest = max(
        len(renderer.prompt_ids([{"role": "user", "content": row.prompt}])) for row in rows
    )
    turns = sampling.max_turns
    return longest + turns * sampling.max_new_tokens + (turns - 1) * OBSERVATION_TOKENS
