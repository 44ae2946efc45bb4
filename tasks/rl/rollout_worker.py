"""One generator: an engine, the prompts, the tools and the grader."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from configs.schema import PipelineConfig
from configs.schema.rl_engines import VllmEngineConfig
from tasks.environments import tools_named
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Row
from tasks.models.load import load_model, load_tokenizer
from tasks.models.trainable import attach
from tasks.rl.errors import EngineUnavailableError
from tasks.rl.grader import Grader
from tasks.rl.prompt_queue import Ticket
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group, ScoredRollout
from tasks.rl.weight_sync import Receipt, SyncProof, prove
from tasks.sampling.episode import EpisodeTask, run_episodes
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import Rollout, RolloutEngine, SamplingParams


@dataclass(frozen=True)
class Harvest:
    """Ungraded episodes of some tickets."""

    rollouts: tuple[Rollout, ...]
    generated_tokens: int


class RolloutWorker:
    """Plays and grades episodes; takes new weights between two calls."""

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
        self._config = config
        self._rows = {row.id: row for row in rows}
        self._tools = tools_named(config.tools)
        tokenizer = load_tokenizer(snapshot)
        self._renderer = PromptRenderer(tokenizer, config.system_prompt)
        self._engine = self._start_engine(snapshot)
        self._grader = Grader(self._rows)

    def _start_engine(self, snapshot: Path) -> RolloutEngine:
        rl = self._config.rl
        if isinstance(rl.engine, VllmEngineConfig):
            raise EngineUnavailableError(
                "rl.engine.type=vllm needs a GPU build of vLLM, which this environment does not "
                "have; use rl.engine.type=transformers here"
            )
        model = load_model(snapshot, dtype=rl.deepspeed.dtype)
        return TransformersEngine(
            attach(model, rl.trainable, rl.seed),
            end_of_turn_id=self._renderer.end_of_turn_id,
            max_length=self._config.model.max_length,
            max_sequences=rl.engine.max_sequences,
        )

    def sync(self, receipt: Receipt) -> SyncProof:
        """Load published weights and prove them; no sample is drawn from unproven ones.

        Raises:
            SyncProofError: hash or canary disagree.
        """
        read_back = self._engine.load_policy(receipt.weights, receipt.version)
        scores = self._engine.score(receipt.canary.sequences, temperature=1.0)
        return prove(receipt, read_back, scores)

    def play(self, tickets: Sequence[Ticket], samples: int, temperature: float) -> Harvest:
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
        rollouts = run_episodes(
            self._engine,
            tasks,
            self._renderer,
            self._tools,
            max_turns=sampling.max_turns,
            params=SamplingParams(temperature, sampling.max_new_tokens),
        )
        return Harvest(tuple(rollouts), sum(r.sampled_tokens for r in rollouts))

    def grade(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Group and grade episodes; conversation text is kept for the first of a group only."""
        members: dict[str, list[ScoredRollout]] = {}
        for rollout in rollouts:
            members.setdefault(rollout.group_id, []).append(self._grader.grade(rollout))
        return [
            Group(group_id, scored[0].rollout.row_id, tuple(_light(scored)))
            for group_id, scored in members.items()
        ]

    def probe(self) -> list[ProbeResult]:
        """Known-answer probes, answered by the very grader that scores training."""
        return self._grader.probes()


def _light(scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """Drop the conversation text of all but the first sample: it is the bulk of a record."""
    first, *others = scored
    return [first, *(replace(s, rollout=replace(s.rollout, messages=())) for s in others)]
