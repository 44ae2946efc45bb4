"""The llama.cpp engine against transformers, and its continuous batching against one by one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from quantize.convert import convert
from tasks.sampling import llama_cpp_context
from tasks.sampling.errors import FixedPolicyError, NonFiniteLogitsError, PromptTooLongError
from tasks.sampling.llama_cpp_context import (
    GgufDecodeError,
    GgufLoadError,
    LlamaCppContext,
    TokenRangeError,
)
from tasks.sampling.llama_cpp_engine import LlamaCppEngine, draw_tokens, log_softmax
from tasks.sampling.types import (
    GenerateRequest,
    PolicyVersion,
    RolloutEngine,
    SamplingParams,
    StopReason,
)

ROWS, END, CONTEXT = 300, 2, 64


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one two three one two three 12 12 13"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>"
    )


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=ROWS,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=0,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        model.lm_head.weight[END] *= 3  # turns end now and then
    return model


@pytest.fixture(scope="module")
def gguf(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return convert(folder, folder / "F32.gguf", "f32").path


@pytest.fixture
def engine(gguf):
    with LlamaCppEngine(gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=8) as engine:
        yield engine


def requests(count, temperature, max_new_tokens=12):
    rng = np.random.default_rng(count)
    return [
        GenerateRequest(
            f"r{i}",
            tuple(rng.integers(3, 280, int(rng.integers(1, 20))).tolist()),
            SamplingParams(temperature, max_new_tokens),
            seed=i,
        )
        for i in range(count)
    ]


@torch.inference_mode()
def hf_logits(model, ids):
    return model(input_ids=torch.tensor([list(ids)])).logits[0].numpy()


def test_it_is_a_rollout_engine(engine):
    assert isinstance(engine, RolloutEngine)
    assert engine.policy_version == PolicyVersion(0, 0)


def test_logits_equal_transformers(engine, model):
    sequences = [list(range(3, 3 + n)) for n in (1, 40, 7, CONTEXT, 2, 9, 9, 9, 30, 5, 11)]
    for ids, logits in zip(sequences, engine.logits(sequences), strict=True):
        np.testing.assert_allclose(logits, hf_logits(model, ids), atol=2e-4)


def test_a_batch_gives_the_bits_of_one_alone(engine):
    sequences = [list(range(3, 3 + n)) for n in (5, 40, 7)]
    together = engine.logits(sequences)
    for ids, logits in zip(sequences, together, strict=True):
        np.testing.assert_array_equal(engine.logits([ids])[0], logits)


def test_greedy_tokens_are_the_argmax_of_transformers(engine, model):
    for request, done in zip(requests(10, 0.0), engine.generate(requests(10, 0.0)), strict=True):
        ids = list(request.prompt_ids)
        for token, logprob in zip(done.token_ids, done.logprobs, strict=True):
            row = torch.from_numpy(hf_logits(model, ids)[-1]).double()
            assert token == int(row.argmax())
            assert logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-4)
            ids.append(token)
        assert (done.token_ids[-1] == END) == (done.stop_reason is StopReason.END_OF_TURN)
        assert done.request_id == request.request_id


def test_logprobs_are_the_tempered_ones_that_score_gives(engine):
    asked = requests(9, 0.7)
    done = engine.generate(asked)
    scores = engine.score(
        [r.prompt_ids + d.token_ids for r, d in zip(asked, done, strict=True)], 0.7
    )
    for request, completion, score in zip(asked, done, scores, strict=True):
        assert len(score) == len(request.prompt_ids) + len(completion.token_ids) - 1
        np.testing.assert_allclose(
            score[len(request.prompt_ids) - 1 :], completion.logprobs, atol=1e-5
        )


def test_score_of_one_token_is_empty_and_zero_reads_as_one(engine):
    assert engine.score([[5]], 1.0) == [()]
    assert engine.score([[5, 6, 7]], 0.0) == engine.score([[5, 6, 7]], 1.0)


def test_a_request_does_not_depend_on_the_batch_around_it(gguf):
    asked = requests(30, 1.0)
    with LlamaCppEngine(gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=3) as narrow:
        few = narrow.generate(asked)
        alone = [narrow.generate([r])[0] for r in asked[:5]]
    with LlamaCppEngine(gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=30) as wide:
        many = wide.generate(asked)
        backwards = wide.generate(asked[::-1])[::-1]
    tokens = [c.token_ids for c in few]
    assert tokens == [c.token_ids for c in many] == [c.token_ids for c in backwards]
    assert tokens[:5] == [c.token_ids for c in alone]
    assert len({len(t) for t in tokens}) > 2  # some turns ended early, so slots were refilled
    assert few[0].request_id == "r0" and few[-1].request_id == "r29"


def test_a_next_turn_goes_on_from_what_the_cache_holds(gguf, monkeypatch):
    """Two turns of 12 conversations: the same tokens as anew, and only the new ones are fed."""
    observation = (9, 8, 7)
    first = requests(12, 1.0)

    def second(done):
        return [
            GenerateRequest(r.request_id, (*r.prompt_ids, *d.token_ids, *observation), r.params, 5)
            for r, d in zip(first, done, strict=True)
        ]

    with LlamaCppEngine(gguf, n_ctx_per_seq=2 * CONTEXT, parallel_sequences=12) as engine:
        fed = []
        decode = engine.context.decode
        monkeypatch.setattr(
            engine.context, "decode", lambda ids, *rest: fed.append(len(ids)) or decode(ids, *rest)
        )
        asked = second(engine.generate(first))
        fed.clear()
        kept = engine.generate(asked[::-1])[::-1]  # whoever comes first, each finds its own slot
        # the last token drawn and the observation, then one for each token but the last
        assert sum(fed) == sum(1 + 3 + len(c.token_ids) - 1 for c in kept)
        engine.logits([[5, 6]])  # empties the caches: nothing may be taken for held after it
        anew = engine.generate(asked)
    with LlamaCppEngine(gguf, n_ctx_per_seq=2 * CONTEXT, parallel_sequences=1) as one:
        alone = one.generate(asked)
    tokens = [c.token_ids for c in kept]
    assert tokens == [c.token_ids for c in anew] == [c.token_ids for c in alone]
    for a, b in zip(kept, anew, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_what_greedy_decoding_would_choose(engine):
    asked = requests(9, 0.0)
    whole = [r.prompt_ids + c.token_ids for r, c in zip(asked, engine.generate(asked), strict=True)]
    masks = [
        [t >= len(r.prompt_ids) for t in range(len(ids))]
        for r, ids in zip(asked, whole, strict=True)
    ]
    assert engine.chooses(whole, masks) == [True] * 9
    for place in (len(asked[4].prompt_ids), len(whole[4]) - 1):  # first and last drawn token
        ids = list(whole[4])
        ids[place] = (ids[place] + 1) % 250
        changed = [*whole[:4], ids, *whole[5:]]
        assert engine.chooses(changed, masks) == [True] * 4 + [False] + [True] * 4
    assert engine.chooses([whole[0]], [[True] * len(whole[0])]) == [False]  # the first is given
    assert engine.chooses([whole[0]], [[False] * len(whole[0])]) == [True]
    assert engine.chooses([], []) == []


def test_another_seed_draws_otherwise(engine):
    prompt, params = (5, 6, 7), SamplingParams(1.0, 12)
    draws = [engine.generate([GenerateRequest("x", prompt, params, s)])[0] for s in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0].token_ids != draws[2].token_ids


def test_long_prompts_are_cut_into_batches(gguf, model, monkeypatch):
    monkeypatch.setattr(llama_cpp_context, "_MAX_BATCH", 8)
    asked = requests(7, 0.0)
    with LlamaCppEngine(gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=4) as small:
        assert small.context.n_batch == 8
        cut = small.generate(asked)
        logits = small.logits([list(range(3, 40))])[0]
    np.testing.assert_allclose(logits, hf_logits(model, range(3, 40)), atol=2e-4)
    with LlamaCppEngine(gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=4) as whole:
        monkeypatch.undo()
        assert [c.token_ids for c in whole.generate(asked)] == [c.token_ids for c in cut]


def test_only_wanted_rows_are_computed(engine, model):
    ids = list(range(3, 20))
    wanted = np.zeros(17, bool)
    wanted[[2, 16]] = True
    found = list(engine.context.logits_of([ids, [5]], [wanted, np.zeros(1, bool)]))
    np.testing.assert_allclose(found[0], hf_logits(model, ids)[[2, 16]], atol=2e-4)
    assert found[1].shape == (0, ROWS)


def test_stop_reasons_at_the_edges(gguf):
    ends = [i for i in range(ROWS) if i != 40]
    full = GenerateRequest("full", (5,) * CONTEXT, SamplingParams(0.0, 5), 0)
    nearly = GenerateRequest("nearly", (5,) * (CONTEXT - 2), SamplingParams(0.0, 5), 0)
    nothing = GenerateRequest("nothing", (5,), SamplingParams(0.0, 0), 0)
    exact = GenerateRequest("exact", (5,) * (CONTEXT - 5), SamplingParams(0.0, 5), 0)
    with LlamaCppEngine(
        gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=2, end_of_turn_ids=()
    ) as engine:
        done = {c.request_id: c for c in engine.generate([full, nearly, nothing, exact])}
        assert engine.generate([]) == []
    assert done["full"].token_ids == () and done["full"].stop_reason is StopReason.CONTEXT_FULL
    assert len(done["nearly"].token_ids) == 2
    assert done["nearly"].stop_reason is StopReason.CONTEXT_FULL
    assert done["nothing"].stop_reason is StopReason.MAX_TOKENS
    assert len(done["exact"].token_ids) == 5 and done["exact"].stop_reason is StopReason.MAX_TOKENS
    with LlamaCppEngine(
        gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=2, end_of_turn_ids=ends
    ) as engine:
        (completion,) = engine.generate([nearly])
    assert completion.stop_reason is StopReason.END_OF_TURN and len(completion.token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ((), PromptTooLongError),
        ((5,) * (CONTEXT + 1), PromptTooLongError),
        ((5, ROWS), TokenRangeError),
        ((-1,), TokenRangeError),
    ],
)
def test_bad_prompts_are_named_before_anything_is_sampled(prompt, error, engine):
    asked = [*requests(2, 0.0), GenerateRequest("bad one", prompt, SamplingParams(0.0, 3), 0)]
    with pytest.raises(error, match="request bad one"):
        engine.generate(asked)
    assert len(engine.generate(asked[:2])) == 2


def test_weights_are_fixed(engine, tmp_path):
    with pytest.raises(FixedPolicyError, match="open another LlamaCppEngine"):
        engine.load_policy(tmp_path / "x.safetensors", PolicyVersion(1, 2))


def test_no_file_and_a_broken_file(tmp_path, gguf):
    with pytest.raises(GgufLoadError, match="no GGUF file at"):
        LlamaCppEngine(tmp_path / "x.gguf", n_ctx_per_seq=8)
    (tmp_path / "x.gguf").write_bytes(gguf.read_bytes()[:5000])
    with pytest.raises(GgufLoadError, match=r"cannot open .*error"):
        LlamaCppEngine(tmp_path / "x.gguf", n_ctx_per_seq=8)


@pytest.mark.parametrize(("sequences", "length"), [(0, 8), (100_000, 8), (4, 0)])
def test_impossible_sizes_are_refused(sequences, length, gguf):
    with pytest.raises(GgufLoadError, match="expected 1 to"):
        LlamaCppEngine(gguf, n_ctx_per_seq=length, parallel_sequences=sequences)


def test_closing_twice_is_harmless(gguf):
    engine = LlamaCppEngine(gguf, n_ctx_per_seq=8, parallel_sequences=1)
    engine.close()
    engine.close()


def test_nothing_is_written_to_standard_error(gguf, capfd):
    with LlamaCppEngine(gguf, n_ctx_per_seq=CONTEXT, parallel_sequences=2) as engine:
        assert len(engine.generate(requests(3, 0.0))) == 3
    assert capfd.readouterr().err == ""


def test_a_refused_batch_says_why(gguf):
    with LlamaCppContext(gguf, parallel_sequences=1, n_ctx_per_seq=8) as context:
        one = np.array([5], np.int32)
        far = np.array([1], np.int32)  # a sequence that does not exist
        with pytest.raises(GgufDecodeError, match="refused a batch of 1 tokens"):
            context.decode(one, one * 0, far, np.ones(1, bool))


def test_nan_logits_raise(model, tmp_path):
    broken = Qwen3ForCausalLM(model.config)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.model.norm.weight[:] = 3e38
        broken.lm_head.weight[:] = 3e38
    broken.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(NonFiniteLogitsError, match="must not ship"):
        convert(tmp_path, tmp_path / "x.gguf", "f32")


def test_draw_follows_the_cumulative_distribution():
    logits = np.log(np.array([[0.2, 0.3, 0.5]], np.float32)).repeat(6, 0)
    uniform = np.array([0.0, 0.199, 0.201, 0.499, 0.501, 0.9999])
    tokens, logprobs = draw_tokens(logits, np.ones(6, np.float32), uniform)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(np.exp(logprobs), [0.2, 0.2, 0.3, 0.3, 0.5, 0.5], rtol=1e-5)


def test_draw_at_a_temperature_and_greedily_in_one_batch():
    logits = np.array([[0.0, 1.0], [0.0, 1.0]], np.float32)
    tokens, logprobs = draw_tokens(logits, np.array([0.5, 0.0], np.float32), np.array([0.05, 0.05]))
    assert tokens.tolist() == [0, 1]  # P(0) at 1/2 is 1/(1+e²) = 0.119 > 0.05
    assert logprobs[0] == pytest.approx(-math.log(1 + math.exp(2)), abs=1e-6)
    assert logprobs[1] == pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-6)


def test_a_token_of_no_probability_is_never_drawn():
    logits = np.array([[-1e9, 0.0, -1e9]], np.float32).repeat(3, 0)
    tokens, _ = draw_tokens(logits, np.ones(3, np.float32), np.array([0.0, 0.5, 1 - 1e-16]))
    assert tokens.tolist() == [1, 1, 1]


def test_log_softmax_of_large_logits():
    found = log_softmax(np.array([[1e4, 1e4]], np.float32))
    np.testing.assert_allclose(found, math.log(0.5), atol=1e-6)
