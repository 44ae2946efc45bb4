"""The one place that talks to vLLM's `AsyncLLM`; all of it runs on the engine's event loop."""

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tasks.sampling.errors import EngineDiedError, WeightsReadBackError
from tasks.sampling.types import GenerateRequest
from tasks.sampling.vllm_policies import HeldPolicy


@dataclass(frozen=True)
class Flight:
    """One request inside vLLM."""

    name: str
    request_id: str
    carries: bool
    """New weights take it over."""


@dataclass(frozen=True)
class Segment:
    """What one version sampled of a turn."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    """vLLM's word: stop, length, abort."""
    timed_out: bool
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those whose keys and values were still in the cache."""


class VllmClient:
    """Requests into vLLM and answers out of it; knows what is in flight."""

    def __init__(self, arguments: dict[str, Any], on_cache_use: Callable[[float], None]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = AsyncEngineArgs(**arguments).create_engine_config()
        self._llm = AsyncLLM.from_vllm_config(
            config, stat_loggers=[_cache_watch(on_cache_use)], disable_log_stats=True
        )
        self.vocabulary: int = config.model_config.get_vocab_size()
        """Rows of the embedding."""
        self.cache_tokens: int = (config.cache_config.num_gpu_blocks or 0) * (
            config.cache_config.block_size or 0
        )
        """Tokens the key-value cache holds."""
        self._flights: dict[str, Flight] = {}
        self._landed = asyncio.Condition()
        self._serial = itertools.count(1)

    async def settle(self) -> None:
        """Prepare the workers; vLLM's processes end with this one."""
        await self._llm.collective_rpc("policy_settle", args=(os.getpid(),))

    async def sample(
        self,
        request: GenerateRequest,
        drawn: Sequence[int],
        held: HeldPolicy,
        *,
        most: int,
        seed: int,
        stop_id: int,
        carries: bool,
        seconds: float,
    ) -> Segment:
        """At most `most` tokens after prompt and `drawn`, until the turn ends, somebody aborts it
        or `seconds` are over."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.params.temperature,
            max_tokens=most,
            logprobs=0,
            seed=seed,
            stop_token_ids=[stop_id],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        flight = Flight(f"{request.request_id}/{next(self._serial)}", request.request_id, carries)
        self._flights[flight.name] = flight  # from now on: a load of weights waits for it
        answer = asyncio.ensure_future(
            self._ask(flight, [*request.prompt_ids, *drawn], params, held)
        )
        try:
            done, _ = await asyncio.wait({answer}, timeout=max(0.0, seconds))
            if not done:
                await self._llm.abort(flight.name)
            last = await answer
        finally:
            answer.cancel()
            self._flights.pop(flight.name, None)  # where it was cancelled before it took off
        output = last.outputs[0]
        pairs = zip(output.token_ids, output.logprobs or (), strict=False)
        return Segment(
            tuple(output.token_ids),
            tuple(entry[token].logprob for token, entry in pairs if token in entry),
            output.finish_reason,
            timed_out=not done,
            prompt_tokens=len(request.prompt_ids) + len(drawn),
            cached_tokens=last.num_cached_tokens or 0,
        )

    async def score(self, token_ids: Sequence[int], held: HeldPolicy) -> tuple[float, ...]:
        """log p of every token from the second on, at temperature 1."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        flight = Flight(f"score/{next(self._serial)}", "score", carries=False)
        output = await self._ask(flight, list(token_ids), params, held)
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return tuple(entry[token].logprob for token, entry in pairs)

    async def _ask(
        self, flight: Flight, token_ids: list[int], params: Any, held: HeldPolicy
    ) -> Any:
        """Send one request and wait for its last output."""
        prompt = {"prompt_token_ids": token_ids, "cache_salt": held.name}
        self._flights[flight.name] = flight
        last: Any = None
        try:
            with _alive(f"request {flight.request_id}"):
                async for output in self._llm.generate(
                    prompt, params, flight.name, lora_request=_adapter(held)
                ):
                    last = output
        finally:
            self._flights.pop(flight.name, None)
            async with self._landed:
                self._landed.notify_all()
        return last

    async def abort(self, chosen: Callable[[Flight], bool]) -> None:
        """End some of the requests in flight; each answers with what it has."""
        names = [flight.name for flight in self._flights.values() if chosen(flight)]
        if names:
            await self._llm.abort(names)

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        async with self._landed:
            await self._landed.wait_for(lambda: not self._flights)

    async def add_adapter(self, held: HeldPolicy) -> None:
        """Load an adapter beside those there are."""
        with _alive(f"the load of {held.name}"):
            await self._llm.add_lora(_adapter(held))

    async def remove_adapter(self, held: HeldPolicy) -> None:
        """Free an adapter's place."""
        if held.adapter_id:
            await self._llm.remove_lora(held.adapter_id)

    async def load_weights(self, path: str) -> None:
        """Replace the whole model, and forget what was computed with the old one."""
        with _alive(f"the load of {path}"):
            await self._llm.collective_rpc("policy_load_weights", args=(path,))
            await self._llm.reset_prefix_cache()

    async def read_back(self, method: str, *arguments: Any) -> str:
        """The one hash all workers give.

        Raises:
            WeightsReadBackError: they disagree, or compute with other weights than they loaded.
        """
        with _alive("a read-back"):
            answers = await self._llm.collective_rpc(method, args=arguments)
        hashes = {answer["sha256"] for answer in answers}
        differs = sorted({name for answer in answers for name in answer["differs"]})
        if differs or len(hashes) != 1:
            raise WeightsReadBackError(
                f"vLLM's {len(answers)} worker(s) hold {len(hashes)} different policies; modules "
                f"that compute with other weights than were loaded: {differs[:4]}"
            )
        return str(hashes.pop())

    async def sleep(self) -> None:
        """Give device memory back."""
        await self._llm.sleep(level=1)

    async def wake(self) -> None:
        """Take it again."""
        await self._llm.wake_up()

    async def shut_down(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()


@contextmanager
def _alive(what: str) -> Iterator[None]:
    """Name what vLLM died of, in a way every process can read.

    Raises:
        EngineDiedError: vLLM's process is gone.
    """
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except (EngineDeadError, EngineGenerateError) as error:
        raise EngineDiedError(
            f"vLLM died amid {what}; its own messages stand in the log of this stage"
        ) from error


def _adapter(held: HeldPolicy) -> Any:
    from vllm.lora.request import LoRARequest

    if held.folder is None:
        return None
    return LoRARequest(held.name, held.adapter_id, str(held.folder))


def _cache_watch(on_cache_use: Callable[[float], None]) -> Any:
    """A logger of vLLM's statistics that hands on the share of the cache in use."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class CacheWatch(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_cache_use(scheduler_stats.kv_cache_usage)

        def log_engine_initialized(self) -> None:
            pass

    return CacheWatch
