"""An engine that samples whole batches, asked turn by turn: whatever waits is sampled together."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tasks.sampling.answers import checked, one_each
from tasks.sampling.errors import PromptTooLongError, SamplingError
from tasks.sampling.types import Completion, GenerateRequest, PolicyVersion, RolloutEngine

T = TypeVar("T")


class EngineClosedError(SamplingError, RuntimeError):
    """A turn was asked of an engine that is closed, or was on its way when it closed."""


class _Batch:
    """Turns that will be sampled together."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.sampled: asyncio.Task[list[Completion]]


class BatchingEngine:
    """`AsyncRolloutEngine` over a batch engine, which works in one thread of its own.

    Nobody waits for more than the batch being sampled: what arrives meanwhile is the next batch.
    Weights are loaded between two batches, so a turn is of one version and an episode may have one
    version a turn.
    """

    def __init__(self, engine: RolloutEngine, *, vocab_size: int) -> None:
        """`vocab_size`: tokens outside it are refused."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._next: _Batch | None = None
        self._one_at_a_time = asyncio.Lock()
        self._closed = False

    @property
    def policy_version(self) -> PolicyVersion:
        """The version that samples the next batch."""
        return self._engine.policy_version

    @property
    def max_length(self) -> int:
        """Tokens one sequence may have, prompt included."""
        return self._engine.max_length

    async def complete(self, request: GenerateRequest) -> Completion:
        """Sample one turn with whatever else waits.

        Raises:
            PromptTooLongError: the prompt is empty or too long.
            AnswerRefusedError: the answer cannot be trained on.
            EngineClosedError: the engine closed first.
        """
        if self._closed:
            raise EngineClosedError(f"request {request.request_id}: the engine is closed")
        if not 1 <= len(request.prompt_ids) <= self.max_length:  # it must not fail its batch
            raise PromptTooLongError(
                f"request {request.request_id} has {len(request.prompt_ids)} prompt tokens; "
                f"expected 1 to {self.max_length} (model.max_length)"
            )
        if self._next is None:
            self._next = _Batch()
            self._next.sampled = asyncio.create_task(self._sample(self._next))
        batch, place = self._next, len(self._next.requests)
        batch.requests.append(request)
        completions = await asyncio.shield(batch.sampled)  # who gives up leaves the others theirs
        return checked(request, completions[place], self._vocab_size)

    async def _sample(self, batch: "_Batch") -> list[Completion]:
        """Sample a batch once the one before is done; until then others may join it."""
        async with self._one_at_a_time:
            await asyncio.sleep(0)  # whoever asks in the same breath joins
            self._next = None
            completions = await self._apart(self._engine.generate, batch.requests)
            return list(one_each(batch.requests, completions))

    async def _apart(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def load_policy(self, weights: Path, version: PolicyVersion) -> str:
        """Take published weights once the batch being sampled is done."""
        return await self._apart(self._engine.load_policy, weights, version)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """log p(token t | tokens < t) at `temperature` for t ≥ 1."""
        return await self._apart(self._engine.score, sequences, temperature)

    async def close(self) -> None:
        """Finish the batch being sampled and give memory back."""
        self._closed = True
        await self._apart(self._engine.close)
        self._thread.shutdown(wait=False)
