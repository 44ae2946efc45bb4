"""Sampling: tokens hang on weights, prompt, settings and seed alone, and μ is what was sampled."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from configs.schema.training import Lora
from tasks.artifacts import hash_tensors
from tasks.models.errors import WeightsMismatchError
from tasks.models.policy import PolicyModule
from tasks.models.trainable import attach, load_trainable, trainable_tensors
from tasks.sampling.errors import (
    ForeignPromptError,
    NonFiniteLogitsError,
    PromptTooLongError,
    SamplingParamsError,
    ScoreTemperatureError,
)
from tasks.sampling.transformers_engine import TransformersEngine, _Batch
from tasks.sampling.types import (
    GenerateRequest,
    PolicyVersion,
    RolloutEngine,
    SamplingParams,
    StopReason,
)

END = 2
LORA = Lora(r=4, alpha=8, targets=("q_proj", "v_proj"))


def request(name="r", prompt=(1, 5, 9), temperature=1.0, most=12, seed=7) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), SamplingParams(temperature, most), seed)


def crowd(count: int = 20) -> list[GenerateRequest]:
    """Others of other lengths, settings and seeds; some end early, so rows leave the batch."""
    rng = np.random.default_rng(3)
    return [
        request(
            f"other-{i}",
            rng.integers(3, 300, size=int(rng.integers(1, 40))).tolist(),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            most=int(rng.integers(1, 30)),
            seed=i,
        )
        for i in range(count)
    ]


@pytest.fixture
def engine_of(tiny_model):
    def build(model=None, **options) -> TransformersEngine:
        return TransformersEngine(
            model or tiny_model(), end_of_turn_id=END, **{"max_length": 128} | options
        )

    return build


@pytest.fixture
def engine(engine_of) -> TransformersEngine:
    return engine_of()


def full_logprobs(engine, asked: GenerateRequest, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probability of each sampled token by one full forward pass."""
    ids = torch.tensor([[*asked.prompt_ids, *tokens]])
    with torch.no_grad():
        logits = engine.model(input_ids=ids).logits[0, len(asked.prompt_ids) - 1 : -1]
    logp = torch.log_softmax(logits / (asked.params.temperature or 1.0), -1)
    return logp.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def test_it_is_a_rollout_engine(engine):
    assert isinstance(engine, RolloutEngine)
    assert engine.generate([]) == []


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_tokens_do_not_depend_on_the_batch_around_them(engine, temperature):
    asked = request(prompt=range(3, 20), temperature=temperature, most=40)
    alone = engine.generate([asked])[0]
    others = crowd()
    for place in (0, 10, 20):
        among = engine.generate([*others[:place], asked, *others[place:]])
        found = among[place]
        assert found.request_id == "r"
        assert found.token_ids == alone.token_ids and found.stop_reason is alone.stop_reason
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert [c.request_id for c in among[:place]] == [o.request_id for o in others[:place]]


def test_rows_leave_the_batch_on_the_way(engine, monkeypatch):
    widths = []
    draw = _Batch.draw
    monkeypatch.setattr(
        _Batch,
        "draw",
        lambda self, logits, end: widths.append(len(logits)) or draw(self, logits, end),
    )
    engine.generate([request(most=60, seed=1), *crowd()])
    assert widths[0] == 21 and widths[-1] < 12 and len(set(widths)) >= 3


def test_a_shared_prompt_is_read_once_and_each_sample_goes_its_own_way(engine, monkeypatch):
    group = [request(f"a{i}", most=20, seed=i) for i in range(4)]
    asked = [*group[:2], request("b", prompt=range(3, 30), most=20), *group[2:]]
    alone = [engine.generate([one])[0] for one in asked]
    read, forward = [], engine.model.forward
    monkeypatch.setattr(
        engine.model,
        "forward",
        lambda **given: read.append(tuple(given["input_ids"].shape)) or forward(**given),
    )
    together = engine.generate(asked)
    assert read[0] == (2, 27) and read[1] == (5, 1)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in together}) == 5
    for ours, own in zip(together, alone, strict=True):
        assert ours.logprobs == pytest.approx(own.logprobs, abs=1e-4)


def test_cutting_into_chunks_changes_nothing(engine_of):
    asked = crowd(11)
    whole, parts = engine_of().generate(asked), engine_of(max_sequences=4).generate(asked)
    assert [c.token_ids for c in whole] == [c.token_ids for c in parts]


def test_seed_prompt_and_weights_matter(engine, engine_of, tiny_model):
    base = engine.generate([request(most=20)])[0]
    assert engine.generate([request(most=20)])[0] == base
    for changed in (request(most=20, seed=8), request(prompt=(1, 5, 10), most=20)):
        assert engine.generate([changed])[0].token_ids != base.token_ids
    other = engine_of(tiny_model(seed=2)).generate([request(most=20)])[0]
    assert other.token_ids != base.token_ids


def test_a_larger_budget_only_goes_on(engine):
    short, long = (engine.generate([request(most=m, seed=3)])[0].token_ids for m in (4, 30))
    assert long[: len(short)] == short


@pytest.mark.parametrize("length", [1, 7, 30])
def test_greedy_equals_generate(engine, length):
    prompt = torch.arange(3, 3 + length)[None]
    with torch.no_grad():
        expected = engine.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24,
            eos_token_id=END, pad_token_id=0,
        )[0, length:].tolist()  # fmt: skip
    asked = request(prompt=prompt[0].tolist(), temperature=0.0, most=24)
    got = engine.generate([asked, *crowd()])[0]
    assert list(got.token_ids) == expected
    torch.testing.assert_close(
        torch.tensor(got.logprobs), full_logprobs(engine, asked, got.token_ids), rtol=0, atol=1e-4
    )


def test_a06_logprobs_are_those_of_the_tempered_distribution(engine):
    asked = [request(temperature=t, most=20, seed=s) for s in range(5) for t in (0.6, 1.0, 1.4)]
    for one, completion in zip(asked, engine.generate(asked), strict=True):
        expected = full_logprobs(engine, one, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        untempered = full_logprobs(
            engine, replace(one, params=SamplingParams(1.0, 20)), completion.token_ids
        )
        if one.params.temperature != 1.0:
            assert (expected - untempered).abs().max() > 0.01


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_a06_engine_and_learner_agree_so_the_ratio_is_1(engine_of, tiny_model, temperature):
    model = attach(tiny_model(spread=4.0), LORA, seed=0)
    load_trainable(
        model, {n: torch.full_like(t, 0.05) for n, t in trainable_tensors(model).items()}
    )
    engine = engine_of(model)
    asked = [request(f"{i}", [3 + i] * (1 + i % 5), temperature, 16, seed=i) for i in range(24)]
    completions = engine.generate(asked)
    sequences = [[*a.prompt_ids, *c.token_ids] for a, c in zip(asked, completions, strict=True)]
    longest = max(map(len, sequences))
    ids, mask, valid, mu = (torch.zeros(24, longest) for _ in range(4))
    for i, (a, c) in enumerate(zip(asked, completions, strict=True)):
        start, end = len(a.prompt_ids), len(sequences[i])
        ids[i, :end] = torch.tensor(sequences[i], dtype=torch.float)
        valid[i, :end] = mask[i, start:end] = 1
        mu[i, start:end] = torch.tensor(c.logprobs)
    with torch.no_grad():
        learner = PolicyModule(model, value_head=False, seed=0)(
            ids.long(), valid.bool(), mask.bool(), torch.full((24,), temperature)
        ).logprobs_B_T
    assert ((learner - mu).exp() - 1).abs().max() <= 1e-5
    assert mask.sum() > 100


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_follows_the_distribution(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -30.0])
    count = 4000
    batch = _Batch([request(temperature=temperature, most=1, seed=s) for s in range(count)], 128)
    tokens = batch.draw(logits.repeat(count, 1), end_of_turn_id=0).tolist()
    expected = torch.softmax(logits / temperature, -1).tolist()
    seen = Counter(tokens)
    assert seen[4] <= 1
    chi2 = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected[:4]))
    assert chi2 < 16.27  # χ²(3) at 0.1 %; the seeds are fixed


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    batch = _Batch([request(seed=s, most=1) for s in range(500)], 128)
    batch.uniforms[:2, 0] = (0.0, 1 - 2**-53)  # the ends of the interval
    tokens = batch.draw(logits.repeat(500, 1), end_of_turn_id=0).tolist()
    assert tokens[:2] == [1, 3] and set(tokens) == {1, 3}


def test_one_token_is_the_least(engine):
    cut = engine.generate([request(most=1, seed=1)])[0]
    assert len(cut.token_ids) == len(cut.logprobs) == 1
    assert cut.stop_reason is (
        StopReason.END_OF_TURN if cut.token_ids[0] == END else StopReason.MAX_TOKENS
    )


def test_the_turn_ends_with_the_end_token_and_not_after_it(engine_of, tiny_model):
    model = tiny_model()
    ended = [
        c
        for c in engine_of(model).generate([request(seed=s, most=100) for s in range(60)])
        if c.stop_reason is StopReason.END_OF_TURN
    ]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == END and END not in completion.token_ids[:-1]


@pytest.mark.parametrize(("room", "drawn"), [(3, 3), (1, 1), (0, 0)])
def test_a_full_context_ends_the_turn(engine_of, room, drawn):
    engine = engine_of(max_length=20)
    asked = request(prompt=range(3, 23 - room), temperature=0.0, most=8)
    for batch in ([asked], [asked, request("short", most=8)]):
        got = engine.generate(batch)[0]
        assert len(got.token_ids) == len(got.logprobs) == drawn
        assert got.stop_reason is StopReason.CONTEXT_FULL


def test_the_exact_fit_is_max_tokens_not_a_full_context(engine_of):
    engine = engine_of(max_length=20)
    got = engine.generate([request(prompt=range(3, 15), temperature=0.0, most=8)])[0]
    assert len(got.token_ids) == 8 and got.stop_reason is StopReason.MAX_TOKENS


@pytest.mark.parametrize("prompt", [(), range(129)])
def test_an_empty_or_overlong_prompt_is_refused_by_name(engine, prompt):
    with pytest.raises(PromptTooLongError, match=r"request bad .*1 to 128"):
        engine.generate([request(), request("bad", prompt)])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_are_an_error_not_a_sample(engine, bad, temperature):
    with torch.no_grad():
        engine.model.model.norm.weight[0] = bad
    with pytest.raises(NonFiniteLogitsError, match="weights are broken"):
        engine.generate([request(temperature=temperature)])


def test_score_gives_every_token_after_the_first(engine):
    sequences = [(5, 6, 7, 8), (9,), (2, 2)]
    scores = engine.score(sequences, 0.8)
    assert [len(s) for s in scores] == [3, 0, 1]
    asked = request(prompt=(5,), temperature=0.8)
    expected = full_logprobs(engine, asked, (6, 7, 8))
    assert scores[0] == pytest.approx(expected.tolist(), abs=1e-5)


def test_loading_a_policy_reads_the_hash_back_from_memory(engine_of, tiny_model, tmp_path):
    source = attach(tiny_model(), LORA, seed=5)
    tensors = {n: t + 0.01 for n, t in trainable_tensors(source).items()}
    save_file(tensors, tmp_path / "w.safetensors")
    engine = engine_of(attach(tiny_model(), LORA, seed=0))
    before = engine.generate([request(most=20)])[0]
    assert before.policy_version == PolicyVersion(0, 0)
    assert engine.load_policy(tmp_path / "w.safetensors", PolicyVersion(2, 9)) == hash_tensors(
        tensors
    )
    after = engine.generate([request(most=20)])[0]
    assert after.policy_version == engine.policy_version == PolicyVersion(2, 9)
    assert after.logprobs != before.logprobs


def test_weights_that_do_not_fit_leave_the_version_alone(engine_of, tiny_model, tmp_path):
    save_file({"other": torch.zeros(2)}, tmp_path / "w.safetensors")
    engine = engine_of(attach(tiny_model(), LORA, seed=0))
    with pytest.raises(WeightsMismatchError):
        engine.load_policy(tmp_path / "w.safetensors", PolicyVersion(0, 1))
    assert engine.policy_version == PolicyVersion(0, 0)


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, math.nan, math.inf])
def test_a06_no_other_temperature_is_put_in_place_of_one_that_cannot_be(temperature):
    with pytest.raises(SamplingParamsError, match=f"temperature={temperature}: expected a finite"):
        request(temperature=temperature)
    with pytest.raises(SamplingParamsError, match="max_new_tokens=-1: expected 0 or more"):
        SamplingParams(1.0, -1)


def test_a06_greedy_samples_are_scored_as_they_were_sampled(engine):
    (greedy,) = engine.generate([request(temperature=0.0)])
    ids = (1, 5, 9, *greedy.token_ids)
    (scores,) = engine.score([ids], 0.0)
    assert scores[2:] == pytest.approx(greedy.logprobs, abs=1e-4)
    assert scores == engine.score([ids], 1.0)[0]


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a06_nothing_is_scored_at_a_temperature_that_cannot_be(engine, temperature):
    with pytest.raises(ScoreTemperatureError, match=f"temperature={temperature}: expected"):
        engine.score([[1, 2, 3]], temperature)


@pytest.mark.parametrize("prompt", [(1, 320), (-1, 5)])
def test_a_prompt_the_model_does_not_know_is_refused_by_name(engine, prompt):
    with pytest.raises(ForeignPromptError, match=f"request odd .* {max(prompt)}; the model has 0"):
        engine.generate([request(), request("odd", prompt)])
