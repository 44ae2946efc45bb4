"""vLLM as a rollout engine, on its CPU build: what it samples, scores and holds is what was
published. One engine serves all tests but those of full weights; a start takes half a minute."""

import asyncio
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema.model import ScratchModel
from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.training import FullWeights, Lora
from tasks.artifacts import hash_tensors
from tasks.models.errors import WeightsMismatchError
from tasks.models.load import load_model, save_model
from tasks.models.scratch import build_model
from tasks.models.trainable import attach, load_trainable, trainable_tensors
from tasks.sampling.errors import EngineDiedError, PromptTooLongError, ScoreTemperatureError
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import (
    AsyncRolloutEngine,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    StopReason,
)
from tasks.sampling.vllm_policies import PolicyGoneError
from tests.tiny_run import TINY_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

END = 2
LENGTH = 128
MODEL = TINY_MODEL | {"hidden_size": 64, "layers": 2}
LORA = Lora(r=4, alpha=8, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
SETTINGS = VllmEngineConfig(max_sequences=16, kv_cache_gib=0.05, request_timeout_s=60)
KEEP = 2


@pytest.fixture(scope="module")
def snapshot(tiny_tokenizer, tmp_path_factory) -> Path:
    model = build_model(ScratchModel.model_validate(MODEL), tiny_tokenizer, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    folder = tmp_path_factory.mktemp("vllm") / "snapshot"
    save_model(model, tiny_tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def start(snapshot):
    """Start an engine: `start(trainable=…)`; all are ended with the module."""
    from tasks.sampling.vllm_engine import VllmEngine

    running = []

    def build(trainable=LORA, settings=SETTINGS):
        running.append(
            VllmEngine(
                snapshot, settings, trainable,
                dtype="float32", end_of_turn_id=END, max_length=LENGTH, keep=KEEP,
            )
        )  # fmt: skip
        return running[-1]

    yield build
    for engine in running:
        engine.shut_down()


@pytest.fixture(scope="module")
def engine(start):
    return start()


@pytest.fixture(scope="module")
def publish(snapshot, tmp_path_factory):
    """Weights on disk and the model that has them: `publish(seed)`."""

    def build(seed: int, trainable=LORA):
        model = attach(load_model(snapshot), trainable, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in trainable_tensors(model).values():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.2 * noise)
        folder = tmp_path_factory.mktemp(f"publish-{seed}")
        tensors = {k: v.contiguous() for k, v in trainable_tensors(model).items()}
        save_file(tensors, folder / "weights.safetensors")
        return folder / "weights.safetensors", hash_tensors(tensors), model.eval()

    return build


def request(name="r", prompt=(1, 5, 9), temperature=1.0, most=12, seed=7, version=None):
    params = SamplingParams(temperature, most)
    return GenerateRequest(name, tuple(prompt), params, seed, version)


def sampled_logprobs(model, asked: GenerateRequest, tokens) -> torch.Tensor:
    """Log-probability of each sampled token, by one full forward pass of transformers."""
    ids = torch.tensor([[*asked.prompt_ids, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(asked.prompt_ids) - 1 : -1]
    logp = torch.log_softmax(logits / (asked.params.temperature or 1.0), -1)
    return logp.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def all_of(engine, requests):
    """Ask for all at once, as the loop does."""

    async def gather():
        return await asyncio.gather(*(engine.complete(r) for r in requests))

    return asyncio.run(gather())


@pytest.fixture(scope="module")
def published(engine, publish):
    """Version (0, 1), loaded: its model and its hash."""
    weights, sha256, model = publish(1)
    read_back = asyncio.run(engine.load_policy(weights, PolicyVersion(0, 1)))
    assert read_back == sha256
    return model


def test_the_snapshot_samples_before_the_first_publish(engine, snapshot):
    assert isinstance(engine, AsyncRolloutEngine)
    asked = request()
    answer = all_of(engine, [asked])[0]
    assert answer.policy_version == engine.policy_version == PolicyVersion(0, 0)
    expected = sampled_logprobs(load_model(snapshot), asked, answer.token_ids)
    assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_mu_is_the_tempered_logprob_of_what_was_sampled(engine, published, temperature):
    asked = [request(f"r{i}", (1, 5, 9 + i), temperature, 30, i) for i in range(12)]
    answers = all_of(engine, asked)
    for question, answer in zip(asked, answers, strict=True):
        assert answer.request_id == question.request_id
        assert answer.policy_version == PolicyVersion(0, 1)
        expected = sampled_logprobs(published, question, answer.token_ids)
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        if answer.stop_reason is StopReason.END_OF_TURN:
            assert answer.token_ids.index(END) == len(answer.token_ids) - 1
        else:
            assert answer.stop_reason is StopReason.MAX_TOKENS and len(answer.token_ids) == 30
            assert END not in answer.token_ids
    assert len({a.token_ids for a in answers}) > 6 or temperature == 0


def test_greedy_is_what_transformers_picks(engine, published):
    asked = [request(f"g{i}", (1, 7 + i, 9), 0.0, 20) for i in range(6)]
    other = TransformersEngine(published, end_of_turn_id=END, max_length=LENGTH)
    for mine, theirs in zip(all_of(engine, asked), other.generate(asked), strict=True):
        assert mine.token_ids == theirs.token_ids and mine.stop_reason is theirs.stop_reason
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_the_seed_decides(engine, published):
    asked = [request("a", seed=5, most=20), request("b", seed=5, most=20), request("c", seed=6)]
    first, again, other = all_of(engine, asked)
    assert first.token_ids == again.token_ids != other.token_ids
    assert all_of(engine, asked[:1])[0].token_ids == first.token_ids


def test_scores_are_those_of_transformers(engine, published):
    sequences = [[1, 5, 9, 30, 31, 32, 2], [4, 4], list(range(3, 3 + LENGTH))]
    scores = asyncio.run(engine.score(sequences, 1.0))
    theirs = TransformersEngine(published, end_of_turn_id=END, max_length=LENGTH)
    for mine, other in zip(scores, theirs.score(sequences, 1.0), strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    with pytest.raises(ScoreTemperatureError, match=r"temperature=0\.7"):
        asyncio.run(engine.score(sequences, 0.7))


def test_a_prompt_is_computed_once_for_each_version(engine, publish):
    prompt = tuple(3 + (7 * i) % 200 for i in range(100))

    def cached(count: int) -> int:
        before = engine.counters.cached_tokens
        all_of(engine, [request(f"p{count}", prompt, most=4, seed=count)])
        return engine.counters.cached_tokens - before

    assert [cached(0), cached(1), cached(2)] == [0, 96, 96]  # whole blocks of 32
    asyncio.run(engine.load_policy(publish(21)[0], PolicyVersion(0, 1)))
    assert [cached(3), cached(4)] == [0, 96]
    asyncio.run(engine.load_policy(publish(1)[0], PolicyVersion(0, 1)))  # as it was before


def test_lengths_end_where_they_must(engine, published):
    full = tuple(3 + i % 200 for i in range(LENGTH))
    answers = all_of(engine, [request("full", full), request("near", full[:-2], most=50)])
    assert answers[0].stop_reason is StopReason.CONTEXT_FULL and answers[0].token_ids == ()
    if answers[1].stop_reason is not StopReason.END_OF_TURN:
        assert answers[1].stop_reason is StopReason.CONTEXT_FULL
        assert len(answers[1].token_ids) == 2
    for prompt in ((), (*full, 4)):
        with pytest.raises(PromptTooLongError, match="1 to 128"):
            all_of(engine, [request("long", prompt)])


def endless(engine, publish_now, *, version=None, count=6):
    """Sample long turns, call `publish_now` while they run, and give the answers."""

    async def scenario():
        asked = [request(f"e{i}", (1, 5, 9 + i), 1.5, 120, 100 + i, version) for i in range(count)]
        turns = [asyncio.create_task(engine.complete(r)) for r in asked]
        await asyncio.sleep(0.08)
        await publish_now()
        return asked, await asyncio.gather(*turns)

    return asyncio.run(scenario())


def test_a_publish_carries_running_turns_over(engine, published, publish):
    weights, sha256, newer = publish(2)
    before = engine.counters.carried

    async def load():
        assert await engine.load_policy(weights, PolicyVersion(0, 2)) == sha256

    asked, answers = endless(engine, load)
    carried = [a for a in answers if len(a.spans) == 2]
    assert carried, [a.spans for a in answers]
    assert engine.counters.carried >= before + len(carried)
    for question, answer in zip(asked, answers, strict=True):
        assert [s.version.step for s in answer.spans] in ([1], [2], [1, 2])
        by_version = {
            1: sampled_logprobs(published, question, answer.token_ids),
            2: sampled_logprobs(newer, question, answer.token_ids),
        }
        for start, end, version in answer.spans:
            expected = by_version[version.step][start:end].tolist()
            assert answer.logprobs[start:end] == pytest.approx(expected, abs=1e-4)
        assert answer.policy_version == answer.spans[0].version


def test_a_turn_bound_to_a_version_ends_on_it(engine, publish):
    weights, _, _ = publish(3)
    bound = engine.policy_version

    async def load():
        await engine.load_policy(weights, PolicyVersion(0, 3))

    _, answers = endless(engine, load, version=bound)
    assert engine.policy_version == PolicyVersion(0, 3)
    assert {s.version for a in answers for s in a.spans} == {bound}
    later = all_of(engine, [request("later", version=bound)])[0]
    assert later.policy_version == bound
    # two publishes on, it is gone: `keep` is 2
    for step in (4, 5):
        asyncio.run(engine.load_policy(publish(step)[0], PolicyVersion(0, step)))
    with pytest.raises(PolicyGoneError, match=r"\(0, 2\) is asked for, held are \[\(0, 4\)"):
        all_of(engine, [request("lost", version=PolicyVersion(0, 2))])


def test_swapped_and_misfit_adapters_do_not_pass(engine, publish, tmp_path):
    weights, _, _ = publish(6)
    _, other_hash, _ = publish(7)
    assert asyncio.run(engine.load_policy(weights, PolicyVersion(0, 6))) != other_hash
    tensors = load_file(weights)
    wrong_rank = {k: v[:2] if "lora_A" in k else v[:, :2] for k, v in tensors.items()}
    missing = {k: v for k, v in tensors.items() if ".1.mlp.down_proj." not in k}
    foreign = {k.replace("q_proj", "k_proj"): v for k, v in tensors.items()}
    for name, wrong, says in (
        ("rank", wrong_rank, "rank 2, rl.trainable.r=4"),
        ("missing", missing, "18 tensors; 2 layers .* make 20"),
        ("foreign", foreign, "belongs to no adapter"),
    ):
        path = tmp_path / name / "weights.safetensors"
        path.parent.mkdir()
        save_file({k: v.contiguous() for k, v in wrong.items()}, path)
        with pytest.raises(WeightsMismatchError, match=says):
            asyncio.run(engine.load_policy(path, PolicyVersion(0, 7)))
    assert engine.policy_version == PolicyVersion(0, 6)  # none of them samples


def test_aborted_and_overdue_turns_are_answered_and_counted(engine):
    async def scenario():
        turn = asyncio.create_task(engine.complete(request("gone", most=120, temperature=1.5)))
        await asyncio.sleep(0.05)
        await engine.abort("gone")
        return await turn

    answer = asyncio.run(scenario())
    assert answer.stop_reason is StopReason.ABORTED and len(answer.token_ids) < 120
    assert len(answer.logprobs) == len(answer.token_ids)
    engine._settings = SETTINGS.model_copy(update={"request_timeout_s": 0.05})
    try:
        late = all_of(engine, [request("late", most=120, temperature=1.5)])[0]
    finally:
        engine._settings = SETTINGS
    assert late.stop_reason is StopReason.ABORTED
    assert (engine.counters.aborted, engine.counters.timed_out) == (1, 1)


def test_after_a_rest_it_goes_on_as_before(engine, publish):
    weights, sha256, _ = publish(31)
    asked = [request(f"b{i}", seed=i) for i in range(5)]

    async def rest() -> None:
        assert await engine.load_policy(weights, PolicyVersion(0, 31)) == sha256
        before = [await engine.complete(r) for r in asked]
        await engine.sleep()  # the CPU build keeps its memory; order and state can be seen here
        await engine.wake()
        assert [await engine.complete(r) for r in asked] == before

    asyncio.run(rest())
    assert engine.policy_version == PolicyVersion(0, 31) and engine.max_length == LENGTH


def test_more_requests_than_sequences_all_come_back(engine):
    asked = [request(f"m{i}", (1, 5, 3 + i), 1.0, 16, i) for i in range(60)]
    answers = all_of(engine, asked)
    assert [a.request_id for a in answers] == [r.request_id for r in asked]
    assert 0 < engine.counters.kv_use_peak < 1 and engine.concurrency <= 16


def test_full_weights_are_replaced_and_read_back(start, publish, snapshot):
    before = set(psutil.Process().children())
    engine = start(FullWeights())
    cores = set(psutil.Process().children()) - before
    own = hash_tensors(dict(load_model(snapshot).state_dict()) | {})
    weights, sha256, model = publish(11, FullWeights())
    assert sha256 != own
    asked = request("before", most=20)
    assert all_of(engine, [asked])[0].policy_version == PolicyVersion(0, 0)

    async def load():
        assert await engine.load_policy(weights, PolicyVersion(0, 1)) == sha256

    _, answers = endless(engine, load)
    assert {s.version.step for a in answers for s in a.spans} == {0, 1}
    after = all_of(engine, [replace(asked, request_id="after")])[0]
    expected = sampled_logprobs(model, asked, after.token_ids)
    assert after.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert all(math.isfinite(x) for x in after.logprobs)
    load_trainable(model, load_file(weights))  # the file is what the model holds
    weights, again, _ = publish(12, FullWeights())
    assert again != sha256
    for core in cores:  # what it is for a loop to lose an engine
        core.kill()
    with pytest.raises(EngineDiedError, match="vLLM died amid request gone"):
        all_of(engine, [request("gone", most=100)])
    with pytest.raises(EngineDiedError, match="vLLM died amid the load"):
        asyncio.run(engine.load_policy(weights, PolicyVersion(0, 2)))


STARTER = """
import sys, time
from pathlib import Path
from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.training import Lora
from tasks.sampling.vllm_engine import VllmEngine

if __name__ == "__main__":
    VllmEngine(
        Path(sys.argv[1]), VllmEngineConfig(kv_cache_gib=0.05, max_sequences=4), Lora(),
        dtype="float32", end_of_turn_id=2, max_length=128, keep=2,
    )
    print("up", flush=True)
    time.sleep(600)
"""


def test_vllm_ends_with_whoever_started_it(snapshot, tmp_path):
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    starter = subprocess.Popen(
        [sys.executable, str(script), str(snapshot)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    try:
        assert starter.stdout.readline() == "up\n"  # nothing else: vLLM logs to standard error
        cores = [p for p in psutil.Process(starter.pid).children() if p.num_threads() > 2]
        assert cores
    finally:
        starter.kill()
        starter.wait()
    _gone, alive = psutil.wait_procs(cores, timeout=10)
    assert not alive, [p.cmdline() for p in alive]
