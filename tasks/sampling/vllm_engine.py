"""Sampling with vLLM: turns stream through one engine while adapters come and go.

vLLM lives in processes of its own; its client runs on an event loop in a thread here, so that
callers may await it from any loop.
"""

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.training import FullWeights, Lora
from tasks.artifacts.content_hash import hash_bytes
from tasks.sampling.answers import checked
from tasks.sampling.errors import (
    EngineStartError,
    PromptTooLongError,
    ScoreTemperatureError,
)
from tasks.sampling.types import (
    Completion,
    GenerateRequest,
    PolicyVersion,
    StopReason,
    VersionSpan,
)
from tasks.sampling.vllm_client import Segment, VllmClient
from tasks.sampling.vllm_concurrency import ConcurrencyLimit, Gate
from tasks.sampling.vllm_policies import HeldPolicy, Shelf, layers_of, policy_name, write_adapter
from tasks.sampling.vllm_settings import check_startable, engine_arguments, environment

T = TypeVar("T")
_STOPS = {"stop": StopReason.END_OF_TURN, "length": StopReason.MAX_TOKENS}


@dataclass
class EngineCounters:
    """What happened to requests since the start."""

    completed: int = 0
    carried: int = 0
    """Went on under newer weights, counted once for each publish."""
    timed_out: int = 0
    aborted: int = 0
    """Ended by the caller."""
    publishes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those that were not computed again."""
    kv_use_peak: float = 0.0


@dataclass
class _Draft:
    """A turn as far as it has come."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def add(self, segment: Segment, version: PolicyVersion) -> None:
        """Append what one version sampled."""
        start = len(self.token_ids)
        self.token_ids.extend(segment.token_ids)
        self.logprobs.extend(segment.logprobs)
        end = len(self.token_ids)
        if end == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(start, end, version))

    def completion(self, stop: StopReason, newest: PolicyVersion) -> Completion:
        """The turn as it is answered."""
        oldest = min((span.version for span in self.spans), default=newest)
        return Completion(
            self.request.request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            stop,
            oldest,
            tuple(self.spans),
        )


def segment_seed(seed: int, drawn: int) -> int:
    """Seed of what follows `drawn` tokens: the stream of a carried turn does not start anew."""
    return seed if not drawn else int(hash_bytes(f"{seed}+{drawn}".encode())[:15], 16)


class VllmEngine:
    """`AsyncRolloutEngine` over vLLM's `AsyncLLM`.

    Raises:
        EngineStartError: the settings cannot work on this machine, or vLLM did not come up.
    """

    def __init__(
        self,
        snapshot: Path,
        settings: VllmEngineConfig,
        trainable: Lora | FullWeights,
        *,
        dtype: str,
        end_of_turn_id: int,
        max_length: int,
        keep: int,
        threads: int = 1,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 (a frozen tuple)
    ) -> None:
        self._settings = settings
        self._trainable = trainable
        self._end = end_of_turn_id
        self._max_length = max_length
        self._layers = layers_of(snapshot)
        on_cpu = torch.version.cuda is None
        check_startable(settings, trainable, snapshot, on_cpu=on_cpu)
        full = isinstance(trainable, FullWeights)
        self._shelf = Shelf(HeldPolicy(version, "snapshot"), keep=1 if full else keep)
        self._serial = itertools.count(1)
        self._ended: set[str] = set()
        self.counters = EngineCounters()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        arguments = engine_arguments(
            snapshot, settings, trainable,
            dtype=dtype, max_length=max_length, keep=keep, on_cpu=on_cpu,
        )  # fmt: skip
        try:
            with environment(threads, settings.start_timeout_s):
                self.run(self._start(arguments))
        except (RuntimeError, ValueError, OSError) as error:
            self._stop_loop()
            raise EngineStartError(
                f"rl.engine.type=vllm did not start on {snapshot}: {error}; its own messages stand "
                "above in this stage's log"
            ) from error

    # -- from any thread or loop -------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` on the engine's loop and wait for it; never from that loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @property
    def policy_version(self) -> PolicyVersion:
        """The newest version loaded."""
        return self._shelf.newest.version

    @property
    def max_length(self) -> int:
        """Tokens one sequence may have, prompt included."""
        return self._max_length

    @property
    def concurrency(self) -> int:
        """Requests that may run at once now."""
        return self._gate.limit

    async def complete(self, request: GenerateRequest) -> Completion:
        """Sample one turn; see `AsyncRolloutEngine`."""
        return await self._there(self._complete(request))

    async def load_policy(self, weights: Path, version: PolicyVersion) -> str:
        """Take published weights while turns are sampled; the hash is read from the workers."""
        return await self._there(self._load_policy(weights, version))

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Log-probabilities of each sequence's tokens from the second on, at temperature 1."""
        return await self._there(self._score(sequences, temperature))

    async def abort(self, request_id: str) -> None:
        """End a turn; it is answered as ABORTED with what it has."""
        self._ended.add(request_id)
        await self._there(self._client.abort(lambda flight: flight.request_id == request_id))

    async def sleep(self) -> None:
        """Give the GPU's memory back until `wake` (`rl.engine.colocated`)."""
        await self._there(self._client.sleep())

    async def wake(self) -> None:
        """Take the memory again; the newest weights are as they were, caches are empty."""
        await self._there(self._client.wake())

    async def close(self) -> None:
        """End vLLM's processes; turns on their way end with an error."""
        await asyncio.to_thread(self.shut_down)

    def shut_down(self) -> None:
        """`close` for those who block."""
        if self._loop.is_running():
            self.run(self._client.shut_down())
            self._stop_loop()

    # -- on the engine's loop ----------------------------------------------------------------------

    async def _start(self, arguments: dict[str, Any]) -> None:
        self._client = VllmClient(arguments, self._observe)
        await self._client.settle()
        ceiling = self._settings.max_sequences
        fitting = self._client.cache_tokens // self._max_length  # however long they become
        first = max(1, min(ceiling, fitting))
        self._limit = ConcurrencyLimit(first, ceiling, self._settings.concurrency)
        self._gate = Gate(first)
        self._open = asyncio.Event()
        self._open.set()
        self._loading = asyncio.Lock()

    def _observe(self, kv_use: float) -> None:
        self.counters.kv_use_peak = max(self.counters.kv_use_peak, kv_use)
        limit = self._limit.observe(kv_use, self._gate.running)
        if limit != self._gate.limit:
            self._gate.resize(limit)

    async def _complete(self, request: GenerateRequest) -> Completion:
        room = self._max_length - len(request.prompt_ids)
        if not request.prompt_ids or room < 0:
            raise PromptTooLongError(
                f"request {request.request_id} has {len(request.prompt_ids)} prompt tokens; "
                f"expected 1 to {self._max_length} (model.max_length)"
            )
        draft = _Draft(request)
        budget = min(request.params.max_new_tokens, room)
        if budget <= 0:
            return draft.completion(StopReason.CONTEXT_FULL, self.policy_version)
        await self._gate.enter()
        try:
            stop = await self._fill(draft, budget)
        finally:
            self._gate.leave()
            self._ended.discard(request.request_id)
        self.counters.completed += 1
        if stop is StopReason.MAX_TOKENS and budget < request.params.max_new_tokens:
            stop = StopReason.CONTEXT_FULL
        return checked(
            request, draft.completion(stop, self.policy_version), self._client.vocabulary
        )

    async def _fill(self, draft: _Draft, budget: int) -> StopReason:
        """Sample until the turn ends, under as many versions as it takes."""
        request = draft.request
        carries = self._settings.on_publish == "carry" and request.version is None
        deadline = self._loop.time() + self._settings.request_timeout_s
        while True:
            while not self._open.is_set():
                await self._open.wait()
            held = self._shelf.take(request.version)
            drawn = len(draft.token_ids)
            try:
                segment = await self._client.sample(
                    request, draft.token_ids, held,
                    most=budget - drawn, seed=segment_seed(request.seed, drawn),
                    stop_id=self._end, carries=carries, seconds=deadline - self._loop.time(),
                )  # fmt: skip
            finally:
                self._shelf.give_back(held)
                await self._unload()
            draft.add(segment, held.version)
            self.counters.prompt_tokens += segment.prompt_tokens
            self.counters.cached_tokens += segment.cached_tokens
            if segment.finish in _STOPS:
                return _STOPS[segment.finish]
            if segment.timed_out:
                self.counters.timed_out += 1
                return StopReason.ABORTED
            if request.request_id in self._ended or not carries:
                self.counters.aborted += 1
                return StopReason.ABORTED
            self.counters.carried += 1

    async def _load_policy(self, weights: Path, version: PolicyVersion) -> str:
        async with self._loading:
            if isinstance(self._trainable, Lora):
                read_back = await self._load_adapter(weights, version, self._trainable)
            else:
                read_back = await self._load_everything(weights, version)
            self.counters.publishes += 1
            return read_back

    async def _load_adapter(self, weights: Path, version: PolicyVersion, lora: Lora) -> str:
        """Turns go on while the adapter is loaded beside those in use; then they change over."""
        folder, sha256 = await asyncio.to_thread(write_adapter, weights, lora, self._layers)
        held = HeldPolicy(version, policy_name(version, sha256), next(self._serial), folder)
        await self._client.add_adapter(held)
        scaling = lora.alpha / lora.r
        read_back = await self._client.read_back("policy_adapter_hash", held.adapter_id, scaling)
        self._shelf.put(held)
        await self._client.abort(lambda flight: flight.carries)
        await self._unload()
        return read_back

    async def _load_everything(self, weights: Path, version: PolicyVersion) -> str:
        """There is one copy of the weights: no turn runs while they change."""
        self._open.clear()
        try:
            await self._client.abort(lambda flight: flight.carries)
            await self._client.idle()
            await self._client.load_weights(str(weights.resolve()))
            read_back = await self._client.read_back("policy_weights_hash")
            self._shelf.put(HeldPolicy(version, policy_name(version, read_back)))
            self._shelf.retire()
            return read_back
        finally:
            self._open.set()

    async def _unload(self) -> None:
        """Take out of vLLM what nobody needs any more."""
        for held in self._shelf.retire():
            await self._client.remove_adapter(held)

    async def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        if temperature != 1.0:
            raise ScoreTemperatureError(
                f"temperature={temperature}: vLLM gives a prompt's log-probabilities at "
                "temperature 1 alone; score there, or use rl.engine.type=transformers"
            )
        await self._open.wait()
        held = self._shelf.take(None)
        try:
            return list(await asyncio.gather(*(self._client.score(s, held) for s in sequences)))
        finally:
            self._shelf.give_back(held)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
