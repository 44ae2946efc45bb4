"""An engine that samples whole batches, asked turn by turn: whatever waits is sampled together."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tasks.sampling.answers import checked, one_each
from tasks.sampling.errors import PromptTooLongError, SamplingError
from tasks.sampling.types import Completion, GenerateRequest, PolicyVersion, RolloutEngine

T = TypeVar("T")
CLOSED = "the engine is closed"


class EngineClosedError(SamplingError, RuntimeError):
    """A turn was asked of an engine that is closed, or was on its way when it closed."""


class _Turn:
    """One turn that waits; `placed` is done once it is part of a batch, with its place there."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.placed: asyncio.Future[tuple[asyncio.Task[list[Completion]], int]] = (
            asyncio.get_running_loop().create_future()
        )


class BatchingEngine:
    """`AsyncRolloutEngine` over a batch engine, which works in one thread of its own.

    What arrives while a batch is sampled is the next batch, or more of them where it does not fit
    one; whoever was part of a batch does not wait for those after it. Weights are loaded between
    two batches, so a turn is of one version and an episode may have one version a turn.
    """

    def __init__(self, engine: RolloutEngine, *, vocab_size: int, max_sequences: int) -> None:
        """`vocab_size`: tokens outside it are refused. `max_sequences`: turns of one batch."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._waiting: deque[_Turn] = deque()
        self._sampling: asyncio.Task[None] | None = None
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
            raise EngineClosedError(f"request {request.request_id}: {CLOSED}")
        if not 1 <= len(request.prompt_ids) <= self.max_length:  # it must not fail its batch
            raise PromptTooLongError(
                f"request {request.request_id} has {len(request.prompt_ids)} prompt tokens; "
                f"expected 1 to {self.max_length} (model.max_length)"
            )
        turn = _Turn(request)
        self._waiting.append(turn)
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._sample_batches())
        batch, place = await turn.placed
        completions = await asyncio.shield(batch)  # who gives up leaves the others theirs
        return checked(request, completions[place], self._vocab_size)

    async def _sample_batches(self) -> None:
        """Sample batch after batch until nobody waits."""
        await asyncio.sleep(0)  # whoever asks in the same breath joins
        while turns := self._next_turns():
            batch = asyncio.create_task(self._sample([turn.request for turn in turns]))
            for place, turn in enumerate(turns):
                turn.placed.set_result((batch, place))
            await asyncio.wait({batch})  # its error is for those who wait for it
            await asyncio.sleep(0)
        self._sampling = None

    def _next_turns(self) -> list[_Turn]:
        """Who waits and has not given up, as many as one batch holds; nobody once it is closed."""
        turns: list[_Turn] = []
        while self._waiting and len(turns) < self._max_sequences:
            turn = self._waiting.popleft()
            if turn.placed.done():
                continue
            if self._closed:
                name = turn.request.request_id
                turn.placed.set_exception(EngineClosedError(f"request {name}: {CLOSED}"))
            else:
                turns.append(turn)
        return turns

    async def _sample(self, requests: list[GenerateRequest]) -> list[Completion]:
        return list(one_each(requests, await self._apart(self._engine.generate, requests)))

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
