"""The modelled loop beside the loop itself: the same seconds of work, slept instead of modelled.

Runs with a clock that jumps over sleep, so both are exact whoever else is busy on the machine. The
engine is the project's own batching over one that sleeps for as long as the model says a batch
takes; tools sleep too.
"""

import asyncio
import random
import statistics
from dataclasses import replace

import pytest
from sleepy_runtime import SleepyRuntime

from configs.schema.rl import PublishSchedule
from tasks.rl.figures import Layout, run_model
from tasks.rl.rollout_worker import Harvest
from tasks.rl.simulated_engines import DecodeSpeed, LatencyMix, LengthMix
from tasks.rl.simulated_work import Times, Work
from tasks.rl.weight_sync import Receipt, SyncProof
from tasks.sampling.batching import BatchingEngine
from tasks.sampling.types import (
    Completion,
    GenerateRequest,
    PolicyVersion,
    Rollout,
    SamplingParams,
    StopReason,
    Turn,
)

BATCH, GROUP, STEPS, WARM_UP = 32, 4, 40, 4
SPEED = DecodeSpeed(step_s=0.4, per_sequence_s=0.05, max_sequences=48, continuous=False)
TOKENS = LengthMix(12.0, 0.5, 32)
TURNS_MEAN = 1.5
TOOLS = LatencyMix(4.0, 1.0, 60.0)
ALONE = Layout(1, 1)


class SleepingModel:
    """A `RolloutEngine` that answers at once; how long that takes is for others to sleep."""

    max_length = 64

    def __init__(self) -> None:
        self.policy_version = PolicyVersion(0, 0)

    def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        return [
            Completion(
                r.request_id, (1,) * n, (-1.0,) * n, StopReason.END_OF_TURN, self.policy_version
            )
            for r, n in zip(requests, self.tokens(requests), strict=True)
        ]

    def tokens(self, requests: list[GenerateRequest]) -> list[int]:
        """Of each turn: the same for the same request."""
        return [TOKENS.draw(random.Random(r.request_id)) for r in requests]

    def load_policy(self, receipt: Receipt) -> None:
        self.policy_version = receipt.version

    def score(self) -> None:
        """Nothing to say."""

    def close(self) -> None:
        """Nothing to give back."""


class SleepingEngine(BatchingEngine):
    """The project's own batching; what its one thread would do, one after the other, is slept."""

    def __init__(self, prove_s: float) -> None:
        self.model = SleepingModel()
        super().__init__(self.model, vocab_size=2, max_sequences=SPEED.max_sequences)
        self._one_thread = asyncio.Lock()
        self._prove_s = prove_s

    async def apart(self, work, *arguments):
        """Load or score."""
        return await self._apart(work, *arguments)

    async def _apart(self, work, *arguments):
        async with self._one_thread:  # as fair as a thread's queue
            await asyncio.sleep(self._seconds(work, *arguments))
            return work(*arguments)

    def _seconds(self, work, *arguments) -> float:
        if work != self.model.generate:
            return self._prove_s / 2
        tokens = self.model.tokens(*arguments)
        assert len(tokens) <= SPEED.max_sequences
        return SPEED.step_s * max(tokens) + SPEED.per_sequence_s * sum(tokens)


class ModelledRuntime(SleepyRuntime):
    """Takes the model's seconds for everything, exactly."""

    def __init__(self, limit: int, times: Times, tools: LatencyMix | None) -> None:
        pace = {"train": times.train_s, "publish": times.publish_s}
        super().__init__(limit, pace=pace)
        self._engine = SleepingEngine(times.prove_s)
        self._tools = tools
        self._in_turns = limit == 0

    async def _work(self, call: str, times: float = 1.0) -> None:
        await asyncio.sleep(self.pace.get(call, 0.0) * times)

    async def play(self, worker, tickets, samples, temperature) -> Harvest:
        names = [f"{t.serial}.{t.reissue}.{i}" for t in tickets for i in range(samples)]
        if self._in_turns:
            turns = await self._in_lockstep(names)
        else:
            turns = await asyncio.gather(*(self._episode(name) for name in names))
        played = tuple(_rollout(n, t, temperature) for n, t in zip(names, turns, strict=True))
        self.sampled += len(played)
        return Harvest(played, 0)

    async def _episode(self, name: str) -> list[Completion]:
        done = [await self._turn(name, 0)]
        while len(done) < _turns(name):
            await self._tool(name)
            done.append(await self._turn(name, len(done)))
        return done

    async def _in_lockstep(self, names: list[str]) -> list[list[Completion]]:
        done = {name: [] for name in names}
        while going := [n for n in names if len(done[n]) < _turns(n)]:
            if done[going[0]]:
                await asyncio.gather(*(self._tool(n) for n in going))
            for name, turn in zip(
                going,
                await asyncio.gather(*(self._turn(n, len(done[n])) for n in going)),
                strict=True,
            ):
                done[name].append(turn)
        return list(done.values())

    async def _turn(self, name: str, number: int) -> Completion:
        request = GenerateRequest(f"{name}/{number}", (1,), SamplingParams(1.0, TOKENS.longest), 0)
        return await self._engine.complete(request)

    async def _tool(self, name: str) -> None:
        if self._tools is not None:
            await asyncio.sleep(self._tools.draw(random.Random(f"tool {name}")))

    async def sync(self, worker, receipt: Receipt) -> SyncProof:
        await self._engine.apart(self._engine.model.load_policy, receipt)
        await self._engine.apart(self._engine.model.score)
        self.proven[worker] = receipt.version.step
        self.ever_proven = max(self.ever_proven, receipt.version.step)
        return SyncProof(receipt.version, 0.0, None)


def _turns(name: str) -> int:
    return 1 + (random.Random(f"turns {name}").random() < TURNS_MEAN - 1)


def _rollout(name: str, completions: list[Completion], temperature: float) -> Rollout:
    ids, mask, turns = [0], [False], []
    for completion in completions:
        ids, mask = [*ids, 1, 0], [*mask, True, False]
        turns.append(
            Turn(len(ids) - 2, len(ids) - 1, StopReason.END_OF_TURN, completion.policy_version)
        )
    logprobs = tuple(-1.0 if m else 0.0 for m in mask)
    serial = name.split(".")[0]
    return Rollout(
        name, f"row{serial}", serial, tuple(ids), tuple(mask), logprobs, tuple(turns), temperature
    )


@pytest.mark.parametrize(
    ("limit", "interval", "train_s", "tools"),
    [
        (0, 1, 20.0, None),
        (1, 1, 20.0, None),
        (2, 1, 20.0, None),
        (2, 3, 20.0, None),
        (2, 1, 60.0, None),
        (4, 1, 5.0, None),
        (4, 2, 20.0, None),
        (0, 1, 20.0, TOOLS),
        (2, 3, 20.0, TOOLS),
        (4, 1, 20.0, TOOLS),
    ],
)
def test_the_model_keeps_pace_with_the_loop(run_of, machine_time, limit, interval, train_s, tools):
    publish = PublishSchedule(start=interval, end=interval, over_steps=1)
    work = Work(STEPS, BATCH, GROUP, limit, publish=publish, checkpoint_every=100)
    work = replace(
        work, turns_mean=TURNS_MEAN, tokens=TOKENS, tool_latency=tools, tool_concurrency=1000
    )
    times = Times(SPEED, train_s=train_s, publish_s=0.5, prove_s=1.0)
    dice = [run_model(work, times, ALONE, seed) for seed in range(8)]
    wall_s = statistics.fmean(modelled.wall_s for modelled in dice)

    runtime = ModelledRuntime(limit, times, tools)
    run = run_of(
        runtime, steps=STEPS, batch_size=BATCH, group_size=GROUP, publish=publish.model_dump()
    )
    with asyncio.Runner(loop_factory=machine_time.loop) as runner:
        runner.run(asyncio.wait_for(run.loop.run(None), 100 * wall_s))

    ledger = run.state.ledger.to_json(1.0)["seconds"]
    assert ledger["learner"]["train"] == pytest.approx(STEPS * train_s, rel=0.02)
    # lengths, turns and waits are drawn by other dice on both sides; a slow tool may cost a batch
    # and in the loop whoever asks again when a batch ends may miss the next one
    assert run.loop.wall_s() == pytest.approx(wall_s, rel=0.12 if tools else 0.08)
    ages = [line["values"]["staleness_mean"] for line in run.metrics[WARM_UP:]]
    expected = [age for modelled in dice for age in modelled.ages[WARM_UP * BATCH // GROUP :]]
    assert statistics.fmean(ages) == pytest.approx(
        statistics.fmean(expected), abs=0.5 if tools else 0.3
    )
