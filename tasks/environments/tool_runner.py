"""Tool calls beside each other: how many at once, how often, how long, and how often again."""

import asyncio
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from configs.schema.rl_tools import LogNormalLatency, ToolSettings
from tasks.environments.toolcall import Tool, ToolCall, answer_tool_call, parse_tool_call

ERROR = "error:"


@dataclass(frozen=True)
class ToolRequest:
    """An assistant message that may hold a call, and the seed of the call's simulated latency."""

    text: str
    seed: str


@dataclass(frozen=True)
class ToolAnswer:
    """What answers a call, and how it went."""

    text: str
    timeouts: int = 0
    """Tries that were given up."""

    @property
    def is_error(self) -> bool:
        """Whether the policy is told of an error."""
        return self.text.startswith(ERROR)


def latency_s(config: LogNormalLatency, seed: str) -> float:
    """The simulated latency of one call: the same for the same seed, whoever asks."""
    normal = random.Random(seed).gauss(0.0, 1.0)
    return min(config.max_s, config.median_s * math.exp(config.sigma * normal))


class ToolRunner:
    """Answers tool calls under limits; one for each rollout worker, from any event loop.

    A tool runs in a thread of its own that does not outlive the process. One that never returns
    costs its call the time-out and leaves that thread behind: `abandoned` counts them.
    """

    def __init__(self, tools: Mapping[str, Tool], settings: ToolSettings | None = None) -> None:
        """Without `settings` their defaults hold."""
        self._tools = tools
        self._settings = settings or ToolSettings()
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._rate_free_at_s = 0.0
        self.abandoned = 0

    def answer_all(self, requests: Sequence[ToolRequest]) -> list[ToolAnswer | None]:
        """Answer many messages at once and wait for all; for callers that are no coroutines."""

        async def all_of_them() -> list[ToolAnswer | None]:
            return await asyncio.gather(*(self.answer(r) for r in requests))

        if not any(self._calls_a_tool(r.text) for r in requests):
            return [self._answered(r.text) for r in requests]
        with ThreadPoolExecutor(1) as apart:  # the caller's thread may run an event loop already
            return apart.submit(asyncio.run, all_of_them()).result()

    async def answer(self, request: ToolRequest) -> ToolAnswer | None:
        """The observation that answers a message; None = it calls no tool.

        A call nobody answers in time gets an `error: …` observation, as a tool's own error does.
        """
        if not self._calls_a_tool(request.text):
            return self._answered(request.text)
        settings = self._settings
        failure, timeouts = "", 0
        async with self._place():
            for attempt in range(settings.retries + 1):
                await self._keep_the_rate()
                call = self._call(request.text, f"{request.seed}/{attempt}")
                try:
                    text = await asyncio.wait_for(call, settings.timeout_s)
                    return None if text is None else ToolAnswer(text, timeouts)
                except TimeoutError:
                    timeouts += 1
                    failure = f"no answer within {settings.timeout_s:g} s"
                except OSError as error:
                    failure = f"the tool cannot be reached: {error}"
        return ToolAnswer(f"{ERROR} {failure}", timeouts)

    def _calls_a_tool(self, text: str) -> bool:
        return bool(self._tools) and isinstance(parse_tool_call(text), ToolCall)

    def _answered(self, text: str) -> ToolAnswer | None:
        """What answers a message without any tool: nothing, or what is wrong with the call."""
        answer = answer_tool_call(text, self._tools)
        return None if answer is None else ToolAnswer(answer)

    def _place(self) -> asyncio.Semaphore:
        """The places of the running event loop: a semaphore belongs to one."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self._settings.concurrency))
        return self._places[1]

    async def _call(self, text: str, seed: str) -> str | None:
        if self._settings.simulated_latency is not None:
            await asyncio.sleep(latency_s(self._settings.simulated_latency, seed))
        answer: Future[str | None] = Future()
        answer.set_running_or_notify_cancel()

        def work() -> None:
            try:
                answer.set_result(answer_tool_call(text, self._tools))
            except BaseException as error:  # noqa: BLE001 (raised where the answer is awaited)
                answer.set_exception(error)

        threading.Thread(target=work, name="tool-call", daemon=True).start()
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise

    async def _keep_the_rate(self) -> None:
        """Wait for the next start the rate allows."""
        rate = self._settings.rate_per_s
        if rate is not None:
            now_s = time.monotonic()
            start_s = max(now_s, self._rate_free_at_s)
            self._rate_free_at_s = start_s + 1 / rate
            await asyncio.sleep(start_s - now_s)
