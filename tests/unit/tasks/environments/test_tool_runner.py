"""Tool calls under limits: beside each other, paced, given up, tried again, and slow on purpose."""

import asyncio
import statistics
import threading
import time

import pytest

from configs.schema.rl_tools import LogNormalLatency, ToolSettings
from tasks.environments import tools_named
from tasks.environments.tool_runner import ToolAnswer, ToolRequest, ToolRunner, latency_s
from tasks.environments.toolcall import ToolError, render_tool_call


def call(tool: str = "t", n: int = 0, **arguments) -> ToolRequest:
    return ToolRequest(render_tool_call(tool, arguments), f"seed{n}")


class Slow:
    """A tool that takes its time, and knows how many callers it has at once."""

    def __init__(self, seconds: float, failures: int = 0, error: type[Exception] = OSError):
        self.seconds, self.failures, self.error = seconds, failures, error
        self.now = self.most = self.calls = 0
        self.starts_s: list[float] = []
        self._lock = threading.Lock()

    def __call__(self, arguments) -> str:
        with self._lock:
            self.starts_s.append(time.monotonic())
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
            fails = self.calls <= self.failures
        time.sleep(self.seconds)
        with self._lock:
            self.now -= 1
        if fails:
            raise self.error("no route")
        return "done"


def runner(tool, **settings) -> ToolRunner:
    return ToolRunner({"t": tool}, ToolSettings(**settings))


def test_calls_run_beside_each_other_up_to_the_limit():
    slow = Slow(0.05)
    started_s = time.monotonic()
    answers = runner(slow, concurrency=4).answer_all([call(n=i) for i in range(8)])
    assert answers == [ToolAnswer("done")] * 8
    assert slow.most == 4 and 0.1 <= time.monotonic() - started_s < 0.3


def test_the_rate_is_kept_over_all_calls():
    slow = Slow(0.0)
    runner(slow, rate_per_s=50.0).answer_all([call(n=i) for i in range(5)])
    assert slow.starts_s[-1] - slow.starts_s[0] >= 4 / 50 - 0.005


def test_a_call_nobody_answers_is_tried_again_and_then_an_observation():
    slow = Slow(0.5)
    tools = runner(slow, timeout_s=0.05, retries=1)
    started_s = time.monotonic()
    (answer,) = tools.answer_all([call()])
    assert time.monotonic() - started_s < 0.4  # nobody waits for the threads left behind
    assert answer == ToolAnswer("error: no answer within 0.05 s", timeouts=2)
    assert answer.is_error and slow.calls == tools.abandoned == 2


@pytest.mark.parametrize(
    ("failures", "text", "calls"),
    [(1, "done", 2), (2, "error: the tool cannot be reached: no route", 2)],
)
def test_a_broken_connection_is_tried_again(failures, text, calls):
    slow = Slow(0.0, failures)
    (answer,) = runner(slow, retries=1).answer_all([call()])
    assert (answer.text, answer.timeouts, slow.calls) == (text, 0, calls)


def test_a_tools_own_error_is_its_answer_and_a_bug_is_raised():
    refuses = Slow(0.0, 9, ToolError)
    assert runner(refuses).answer_all([call()]) == [ToolAnswer("error: no route")]
    assert refuses.calls == 1
    with pytest.raises(KeyError, match="no route"):
        runner(Slow(0.0, 9, KeyError)).answer_all([call()])


def test_what_calls_no_tool_takes_no_time_whatever_the_latency():
    latency = LogNormalLatency(median_s=50.0, sigma=0.0, max_s=50.0)
    tools = ToolRunner(tools_named(["calc"]), ToolSettings(simulated_latency=latency))
    texts = ["7", "<tool_call>{", ""]
    answers = tools.answer_all([ToolRequest(t, "s") for t in texts])
    assert answers[0] is answers[2] is None and answers[1].is_error
    assert tools.answer_all([]) == []
    assert ToolRunner({}).answer_all([call("calc", expression="1")]) == [None]


def test_it_answers_inside_a_running_event_loop_too():
    tools = ToolRunner(tools_named(["calc"]))
    requests = [call("calc", i, expression=f"{i}+4") for i in range(3)]

    async def both() -> tuple[list, list]:
        return tools.answer_all(requests), [await tools.answer(r) for r in requests]

    one, other = asyncio.run(both())
    assert one == other == [ToolAnswer("4"), ToolAnswer("5"), ToolAnswer("6")]


def test_simulated_latency_has_its_median_and_cut_and_is_the_same_for_the_same_seed():
    config = LogNormalLatency(median_s=0.3, sigma=1.0, max_s=10.0)
    drawn = [latency_s(config, str(i)) for i in range(4000)]
    assert statistics.median(drawn) == pytest.approx(0.3, rel=0.06)
    assert statistics.mean(drawn) == pytest.approx(0.3 * 2.718281828**0.5, rel=0.1)  # e^(σ²/2)
    assert max(drawn) <= 10.0 and latency_s(config, "7") == drawn[7]
    assert latency_s(config.model_copy(update={"max_s": 0.3}), "7") <= 0.3
    slow = ToolSettings(simulated_latency=LogNormalLatency(median_s=0.05, sigma=0.0))
    started_s = time.monotonic()
    ToolRunner(tools_named(["calc"]), slow).answer_all([call("calc", expression="1")] * 20)
    assert 0.05 <= time.monotonic() - started_s < 0.5  # all twenty at once


def test_a_median_above_the_cut_is_refused():
    with pytest.raises(ValueError, match=r"median_s=3\.0 is above max_s=2\.0"):
        LogNormalLatency(median_s=3.0, max_s=2.0)
