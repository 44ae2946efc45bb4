"""Turn by turn over a batch engine: what waits is one batch, weights come between two."""

import asyncio
import threading
from pathlib import Path

import pytest

from tasks.sampling.answers import AnswerCountError, MissingLogprobsError
from tasks.sampling.batching import BatchingEngine, EngineClosedError
from tasks.sampling.errors import NonFiniteLogitsError, PromptTooLongError
from tasks.sampling.types import (
    AsyncRolloutEngine,
    Completion,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    StopReason,
)

PARAMS = SamplingParams(1.0, 4)


class Batches:
    """A batch engine that stops at a gate, and records what it was asked."""

    max_length = 16

    def __init__(self) -> None:
        self.policy_version = PolicyVersion(0, 0)
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.logprobs = (-1.0,)
        self.closed = False

    def generate(self, requests):
        self.batches.append([r.request_id for r in requests])
        self.inside.set()
        assert self.gate.wait(5)
        if any(r.request_id == "broken" for r in requests):
            raise NonFiniteLogitsError("NaN")
        stop = StopReason.END_OF_TURN
        return [
            Completion(r.request_id, (r.seed,), self.logprobs, stop, self.policy_version)
            for r in requests
        ]

    def load_policy(self, weights, version):
        self.policy_version = version
        return f"hash of {weights}"

    def score(self, sequences, temperature):
        return [(temperature,) * (len(s) - 1) for s in sequences]

    def close(self):
        self.closed = True


def ask(name: str, seed: int = 1, prompt: int = 3) -> GenerateRequest:
    return GenerateRequest(name, (1,) * prompt, PARAMS, seed)


def test_what_asks_at_once_is_one_batch_and_what_comes_meanwhile_the_next():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)
    assert isinstance(engine, AsyncRolloutEngine)

    async def talk():
        inner.gate.clear()
        first = [asyncio.create_task(engine.complete(ask(f"a{i}", i))) for i in range(3)]
        await asyncio.to_thread(inner.inside.wait, 5)
        second = [asyncio.create_task(engine.complete(ask(f"b{i}", i + 5))) for i in range(2)]
        await asyncio.sleep(0)
        inner.gate.set()
        return await asyncio.gather(*first, *second)

    completions = asyncio.run(talk())
    assert inner.batches == [["a0", "a1", "a2"], ["b0", "b1"]]
    assert [(c.request_id, c.token_ids) for c in completions] == [
        ("a0", (0,)), ("a1", (1,)), ("a2", (2,)), ("b0", (5,)), ("b1", (6,)),
    ]  # fmt: skip


def test_what_does_not_fit_one_batch_is_several_and_the_first_is_answered_first():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)
    answered = []

    async def one(name: str):
        completion = await engine.complete(ask(name))
        answered.append((name, len(inner.batches)))
        return completion

    async def talk():
        return await asyncio.gather(*(one(f"a{i}") for i in range(10)))

    assert [c.request_id for c in asyncio.run(talk())] == [f"a{i}" for i in range(10)]
    assert inner.batches == [
        ["a0", "a1", "a2", "a3"], ["a4", "a5", "a6", "a7"], ["a8", "a9"],
    ]  # fmt: skip
    assert dict(answered)["a0"] < 3, "not kept until the last batch is done"


def test_who_waits_when_it_closes_is_told_and_who_gave_up_is_not_sampled():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=2)

    async def talk():
        inner.gate.clear()
        tasks = [asyncio.create_task(engine.complete(ask(f"a{i}"))) for i in range(6)]
        await asyncio.to_thread(inner.inside.wait, 5)
        tasks[2].cancel()
        await asyncio.sleep(0)
        inner.inside.clear()
        inner.gate.set()
        await asyncio.to_thread(inner.inside.wait, 5)
        await engine.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(talk())
    assert inner.batches[:2] == [["a0", "a1"], ["a3", "a4"]]
    assert isinstance(answers[2], asyncio.CancelledError)
    assert [a.request_id for a in answers if isinstance(a, Completion)] == ["a0", "a1", "a3", "a4"]
    assert isinstance(answers[5], EngineClosedError) and "request a5" in str(answers[5])


def test_weights_come_between_two_batches():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)

    async def talk():
        inner.gate.clear()
        old = asyncio.create_task(engine.complete(ask("old")))
        await asyncio.to_thread(inner.inside.wait, 5)
        load = asyncio.create_task(engine.load_policy(Path("w"), PolicyVersion(0, 7)))
        new = asyncio.create_task(engine.complete(ask("new")))
        await asyncio.sleep(0.01)
        assert not load.done() and engine.policy_version == (0, 0)
        inner.gate.set()
        return await asyncio.gather(old, load, new)

    old, read_back, new = asyncio.run(talk())
    assert read_back == "hash of w"
    assert (old.policy_version.step, new.policy_version.step) == (0, 7)


def test_who_gives_up_leaves_the_others_theirs():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)

    async def talk():
        inner.gate.clear()
        tasks = [asyncio.create_task(engine.complete(ask(f"a{i}", i))) for i in range(2)]
        await asyncio.to_thread(inner.inside.wait, 5)
        tasks[0].cancel()
        inner.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, kept = asyncio.run(talk())
    assert isinstance(cancelled, asyncio.CancelledError) and kept.token_ids == (1,)


def test_a_batch_that_fails_fails_for_its_own_and_the_next_one_works():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)

    async def talk():
        pair = [engine.complete(ask(name)) for name in ("broken", "beside")]
        failed = await asyncio.gather(*pair, return_exceptions=True)
        return failed, await engine.complete(ask("next"))

    failed, after = asyncio.run(talk())
    assert [type(e) for e in failed] == [NonFiniteLogitsError] * 2
    assert after.request_id == "next"


def test_a_prompt_that_does_not_fit_fails_alone():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)

    async def talk():
        asked = [ask("long", prompt=17), ask("none", prompt=0), ask("fits", prompt=16)]
        return await asyncio.gather(*map(engine.complete, asked), return_exceptions=True)

    long, none, fits = asyncio.run(talk())
    assert isinstance(long, PromptTooLongError) and isinstance(none, PromptTooLongError)
    assert "17 prompt tokens" in str(long) and fits.request_id == "fits"
    assert inner.batches == [["fits"]]


def test_an_answer_that_cannot_be_trained_on_is_refused():
    inner = Batches()
    inner.logprobs = ()
    with pytest.raises(MissingLogprobsError, match="1 tokens came with 0"):
        asyncio.run(BatchingEngine(inner, vocab_size=10, max_sequences=4).complete(ask("a")))


def test_a_batch_with_an_answer_too_few_is_refused_whole_and_the_next_one_works():
    inner = Batches()
    answer_all = inner.generate
    inner.generate = lambda requests: answer_all(requests)[: max(1, len(requests) - 1)]
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)

    async def talk():
        pair = [engine.complete(ask(name)) for name in ("a", "b")]
        failed = await asyncio.gather(*pair, return_exceptions=True)
        return failed, await engine.complete(ask("next"))

    failed, after = asyncio.run(talk())
    assert [type(e) for e in failed] == [AnswerCountError] * 2 and after.request_id == "next"
    assert "2 requests from a on got 1 answers" in str(failed[0])


def test_scoring_and_closing():
    inner = Batches()
    engine = BatchingEngine(inner, vocab_size=10, max_sequences=4)

    async def talk():
        scores = await engine.score([(1, 2, 3), (1, 2)], 1.0)
        await engine.close()
        with pytest.raises(EngineClosedError, match="request late"):
            await engine.complete(ask("late"))
        return scores

    assert asyncio.run(talk()) == [(1.0, 1.0), (1.0,)] and inner.closed
