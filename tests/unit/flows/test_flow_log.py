"""What a person who watches a flow run reads."""

import logging

import pytest
from rich.markup import render

from flows.flow_log import FlowLog, harmless
from tasks.events import Event


@pytest.fixture
def log(caplog):
    """A log with a clock that stands still until it is set."""
    caplog.set_level(logging.INFO)
    now = [100.0]
    flow_log = FlowLog(logging.getLogger("flow"), clock=lambda: now[0])
    return flow_log, now, caplog


def lines(caplog):
    """Level and text of what was logged."""
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_stage_is_seen_to_start_go_on_and_end(log):
    tell, now, caplog = log
    tell(Event("run_started", message="r1"))
    tell(Event("stage_started", "rl", "first run"))
    for step, at_s in ((1, 101.0), (2, 109.9), (3, 110.0), (4, 112.0), (6, 113.0)):
        now[0] = at_s
        tell(Event("progress", "rl", "reward 0.5", done=step, total=6))
    tell(Event("metrics", "rl", step=6, values={"rl/reward": 0.5}))
    now[0] = 162.5
    tell(Event("stage_finished", "rl", "runs/store/rl/abc"))
    tell(Event("run_finished", message="runs/r1/summary.json"))
    assert lines(caplog) == [
        ("INFO", "run r1"),
        ("INFO", "stage 3/6 rl starts: first run"),
        ("INFO", "stage 3/6 rl 3/6 reward 0.5"),
        ("INFO", "stage 3/6 rl 6/6 reward 0.5"),
        ("INFO", "stage 3/6 rl done in 62.5 s: runs/store/rl/abc"),
        ("INFO", "summary: runs/r1/summary.json"),
    ]


def test_reuse_warnings_and_failures_are_told_apart(log):
    tell, _, caplog = log
    tell(Event("stage_reused", "data", "reused: nothing changed"))
    tell(Event("stage_finished", "data", "runs/store/data/x"))
    tell(Event("warning", "data", "2 rows quarantined"))
    tell(Event("stage_failed", "sft", "out of memory"))
    assert lines(caplog) == [
        ("INFO", "stage 1/6 data reused: nothing changed"),
        ("INFO", "stage 1/6 data done: runs/store/data/x"),
        ("WARNING", "2 rows quarantined"),
        ("ERROR", "stage 2/6 sft failed: out of memory"),
    ]


@pytest.mark.parametrize(
    "text", ["[/bold]", "[red]x", "a\x1b[2Jb\x07", "100 % of %s", "naïve 日本"]
)
def test_hostile_text_is_shown_as_it_is(text, log):
    tell, _, caplog = log
    tell(Event("warning", message=text))
    ((_, logged),) = lines(caplog)
    shown = render(logged).plain  # as Prefect's `--watch` prints it
    assert shown == "".join(c if c.isprintable() else " " for c in text)
    assert harmless("two\nlines") == "two\nlines"
