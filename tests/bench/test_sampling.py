"""Sampling speed: this project's loop over `generate` of transformers, in one run.

Both draw the same number of tokens from the same model at temperature 1 and return each token's
log-probability. `generate` has to keep the scores of every step for that.
"""

import time

import pytest
import torch
from plain_generate import PlainGenerate

from configs.schema.model import ScratchModel
from tasks.models.scratch import build_model, train_tokenizer
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import GenerateRequest, SamplingParams
from tests.figures.record import record

ROWS, NEW_TOKENS, ROUNDS = 128, 32, 3


@pytest.fixture(scope="module")
def model_and_end():
    """The calculator's shape, untrained, so that hardly any row ends early."""
    tokenizer = train_tokenizer(["12+34*5-6=?", "34*7-52=186"], 512)
    return build_model(ScratchModel(), tokenizer, seed=0).eval(), tokenizer.eos_token_id


def best_of(rounds, call):
    """Tokens per second of the fastest of some rounds."""
    rates = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        tokens = call()
        rates.append(tokens / (time.perf_counter() - started_s))
    return max(rates)


@pytest.mark.bench
@pytest.mark.figure("sampling_over_generate")
def test_sampling_loop_over_generate(model_and_end):
    model, end = model_and_end
    prompts = [list(range(3, 3 + 12 + row % 9)) for row in range(ROWS)]
    engine = TransformersEngine(model, end_of_turn_id=end, max_length=512)

    def ours():
        requests = [
            GenerateRequest(str(i), tuple(p), SamplingParams(1.0, NEW_TOKENS), seed=i)
            for i, p in enumerate(prompts)
        ]
        return sum(len(c.token_ids) for c in engine.generate(requests))

    plain = PlainGenerate(model, prompts, end=end, padding=0)

    def theirs():
        out = plain(NEW_TOKENS, output_logits=True, return_dict_in_generate=True)
        with torch.inference_mode():
            model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
        return int((out.sequences[:, plain.prompt_tokens :] != 0).sum())

    reference = best_of(ROUNDS, theirs)  # before the engine's own decode is in place
    ratio = best_of(ROUNDS, ours) / reference
    print(f"\nsampling loop over transformers generate: {ratio:.2f} ×")
    record(
        "sampling_over_generate",
        value=ratio,
        met=ratio >= 1.0,
        note=f"{ROWS} rows × {NEW_TOKENS} tokens, 1.3 M parameters",
    )
    assert ratio > 0.8, "the own loop must not be slower than what it replaces"
