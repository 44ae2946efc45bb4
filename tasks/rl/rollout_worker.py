"""One generator: an engine, the prompts, the tools and the grader."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from configs.schema import PipelineConfig
from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.training import Lora
from tasks.environments import tools_named
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row
from tasks.environments.tool_runner import ToolRunner
from tasks.models.load import load_model, load_tokenizer
from tasks.models.trainable import attach
from tasks.rl.grader import Grader
from tasks.rl.prompt_queue import Ticket
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group, ScoredRollout
from tasks.rl.weight_sync import Receipt, SyncProof, prove
from tasks.sampling.batching import BatchingEngine
from tasks.sampling.episode import EpisodeTask, play_episode, run_episodes
from tasks.sampling.errors import AnswerRefusedError
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import (
    AsyncRolloutEngine,
    Rollout,
    RolloutEngine,
    SamplingParams,
    StopReason,
)
from tasks.sampling.vllm_settings import KERNEL_NOISE

if TYPE_CHECKING:
    from tasks.sampling.vllm_engine import VllmEngine


@dataclass(frozen=True)
class Refusal:
    """An episode that ended because the engine's answer cannot be trained on."""

    rollout_id: str
    group_id: str
    reason: str


@dataclass(frozen=True)
class Harvest:
    """Ungraded episodes of some tickets."""

    rollouts: tuple[Rollout, ...]
    generated_tokens: int
    refused: tuple[Refusal, ...] = ()
    abandoned_tool_calls: int = 0
    """Calls this worker left running, timed out, since its last harvest, whoever's they were."""


class PublishGate:
    """Lets plays end on the weights they began with where an engine holds one version at a time."""

    def __init__(self) -> None:
        self._playing = 0
        self._publishing = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """A play inside the block; it begins after a publish that waits or loads."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._publishing)
            self._playing += 1
        try:
            yield
        finally:
            async with self._changed:
                self._playing -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def publishing(self, *, wait: bool) -> AsyncIterator[None]:
        """Weights are loaded inside the block: at once, or once the plays of now are over."""
        if not wait:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._publishing)
            self._publishing = True
            await self._changed.wait_for(lambda: not self._playing)
        try:
            yield
        finally:
            async with self._changed:
                self._publishing = False
                self._changed.notify_all()


class RolloutWorker:
    """Plays and grades episodes, many tickets at a time; takes new weights meanwhile.

    Where generator and learner work in turns, the transformers engine plays a call's tickets in
    lockstep, bit for bit the same each time. Elsewhere every episode goes its own way: it waits for
    its own turns and tools, and its later turns may come from newer weights
    (`rl.engine.on_publish`).
    """

    def __init__(
        self,
        config: PipelineConfig,
        snapshot: Path,
        rows: Sequence[Row],
        *,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._threads = threads or torch.get_num_threads()
        self._config = config
        self._rows = {row.id: row for row in rows}
        self._tools = ToolRunner(tools_named(config.tools), config.rl.tools)
        self._abandoned_told = 0
        tokenizer = load_tokenizer(snapshot)
        self._renderer = PromptRenderer(tokenizer, config.system_prompt)
        self._engine = self._start_engine(snapshot)
        self._grader = Grader(self._rows, config.rl.reward)
        self._finish = config.rl.engine.on_publish == "finish"
        self._gate = PublishGate()

    def _start_engine(self, snapshot: Path) -> RolloutEngine | AsyncRolloutEngine:
        """The engine of the config; one that samples whole batches where that is in lockstep."""
        rl = self._config.rl
        if isinstance(rl.engine, VllmEngineConfig):
            return self._start_vllm(rl.engine, snapshot)
        model = load_model(snapshot, dtype=rl.deepspeed.dtype)
        vocab_size = int(model.config.vocab_size)
        engine = TransformersEngine(
            attach(model, rl.trainable, rl.seed),
            end_of_turn_id=self._renderer.end_of_turn_id,
            max_length=self._config.model.max_length,
            max_sequences=rl.engine.max_sequences,
        )
        if rl.in_turns:
            return engine
        return BatchingEngine(engine, vocab_size=vocab_size, max_sequences=rl.engine.max_sequences)

    def _start_vllm(self, settings: VllmEngineConfig, snapshot: Path) -> "VllmEngine":
        from tasks.sampling.vllm_engine import VllmEngine

        rl = self._config.rl
        return VllmEngine(
            snapshot,
            settings,
            rl.trainable,
            dtype=rl.deepspeed.dtype,
            end_of_turn_id=self._renderer.end_of_turn_id,
            max_length=self._config.model.max_length,
            keep=rl.staleness_limit + 2,
            threads=self._threads,
        )

    async def sync(self, receipt: Receipt) -> SyncProof:
        """Load published weights and prove them.

        Episodes go on meanwhile; the loop keeps what the new weights sampled away from the learner
        until the proof is there.

        Raises:
            SyncProofError: hash or canary disagree.
        """
        engine, sequences = self._engine, receipt.canary.sequences
        if isinstance(engine, RolloutEngine):
            read_back = engine.load_policy(receipt.weights, receipt.version)
            scores = engine.score(sequences, temperature=1.0)
            return prove(receipt, read_back, scores, self._kernel_noise)
        async with self._gate.publishing(wait=self._finish and not self._holds_versions):
            read_back = await engine.load_policy(receipt.weights, receipt.version)
            scores = await engine.score(sequences, temperature=1.0)
            return prove(receipt, read_back, scores, self._kernel_noise)

    async def play(self, tickets: Sequence[Ticket], samples: int, temperature: float) -> Harvest:
        """Sample `samples` episodes for every ticket."""
        tasks = [
            EpisodeTask(
                rollout_id=f"{ticket.serial}.{ticket.reissue}.{sample}",
                row_id=ticket.row_id,
                group_id=str(ticket.serial),
                messages=({"role": "user", "content": self._rows[ticket.row_id].prompt},),
                seed=ticket.seed(self._config.rl.seed, sample),
            )
            for ticket in tickets
            for sample in range(samples)
        ]
        sampling = self._config.rl.sampling
        params = SamplingParams(temperature, sampling.max_new_tokens)
        played: list[Rollout | Refusal]
        if isinstance(self._engine, RolloutEngine):
            played = list(
                run_episodes(
                    self._engine, tasks, self._renderer, self._tools,
                    max_turns=sampling.max_turns, params=params,
                )
            )  # fmt: skip
        else:
            async with self._gate.playing():
                played = await asyncio.gather(
                    *(self._episode(self._engine, task, params) for task in tasks)
                )
        rollouts = tuple(p for p in played if isinstance(p, Rollout))
        refused = tuple(p for p in played if isinstance(p, Refusal))
        tokens = sum(r.sampled_tokens for r in rollouts)
        return Harvest(rollouts, tokens, refused, self._newly_abandoned())

    def _newly_abandoned(self) -> int:
        """Tool calls left running that no harvest has told of."""
        told, self._abandoned_told = self._abandoned_told, self._tools.abandoned
        return self._abandoned_told - told

    async def _episode(
        self, engine: AsyncRolloutEngine, task: EpisodeTask, params: SamplingParams
    ) -> Rollout | Refusal:
        try:
            rollout = await play_episode(
                engine,
                task,
                self._renderer,
                self._tools,
                max_turns=self._config.rl.sampling.max_turns,
                params=params,
                version=engine.policy_version if self._finish else None,
            )
        except AnswerRefusedError as error:
            return Refusal(task.rollout_id, task.group_id, str(error))
        if rollout.turns[-1].stop_reason is StopReason.ABORTED:
            reason = "a turn was aborted, or took longer than rl.engine.request_timeout_s"
            return Refusal(task.rollout_id, task.group_id, reason)
        return rollout

    @property
    def _kernel_noise(self) -> float:
        """Nats the engine's scores are off the learner's with the same weights."""
        rl = self._config.rl
        return KERNEL_NOISE[rl.deepspeed.dtype] if isinstance(rl.engine, VllmEngineConfig) else 0.0

    @property
    def _holds_versions(self) -> bool:
        """Whether the engine goes on sampling from older weights when it has newer ones."""
        rl = self._config.rl
        return isinstance(rl.engine, VllmEngineConfig) and isinstance(rl.trainable, Lora)

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """The device is the learner's inside the block (`rl.engine.colocated`)."""
        settings = self._config.rl.engine
        if not (isinstance(settings, VllmEngineConfig) and settings.colocated):
            yield
            return
        engine = cast("VllmEngine", self._engine)
        await engine.sleep()
        try:
            yield
        finally:
            await engine.wake()

    async def close(self) -> None:
        """End the engine's own processes, where it has any."""
        if isinstance(self._engine, RolloutEngine):
            self._engine.close()
        else:
            await self._engine.close()

    def grade(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Group and grade episodes; see `grade_groups`."""
        return grade_groups(self._grader, rollouts)

    def probe(self) -> list[ProbeResult]:
        """Known-answer probes, answered by the very grader that scores training."""
        return self._grader.probes()


def grade_groups(grader: Grader, rollouts: Sequence[Rollout]) -> list[Group]:
    """Group and grade episodes; conversation text is kept for the first of a group only."""
    members: dict[str, list[ScoredRollout]] = {}
    for rollout in rollouts:
        members.setdefault(rollout.group_id, []).append(grader.grade(rollout))
    return [
        Group(group_id, scored[0].rollout.row_id, tuple(_light(scored)))
        for group_id, scored in members.items()
    ]


def _light(scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """Drop the conversation text of all but the first sample: it is the bulk of a record."""
    first, *others = scored
    return [first, *(replace(s, rollout=replace(s.rollout, messages=())) for s in others)]
