"""Attempts of the loop over a sleepy runtime, and what must hold of every one."""

import asyncio
from collections import Counter
from collections.abc import Callable

from tasks.artifacts.progress import Reporter, read_metrics
from tasks.rl.checkpoint import Checkpoints
from tasks.rl.exchange import slots_of
from tasks.rl.loop import AsyncLoop
from tasks.rl.loop_state import LoopState
from tasks.rl.prompt_queue import PromptQueue

TIMEOUT_S = 60
"""No run takes a tenth of it: one that stands still is told from one on a busy machine."""


class Run:
    """One attempt of the loop over a sleepy runtime."""

    def __init__(self, config, runtime, folder, *, resume=False) -> None:
        self.config, self.runtime, self.folder = config.rl, runtime, folder
        queue = PromptQueue([f"row{i}" for i in range(500)], seed=0)
        self.state = LoopState(config.rl, queue, slots_of(runtime))
        self.checkpoints = Checkpoints(folder / "checkpoints", {"config": "c"})
        self.saved = self.checkpoints.latest() if resume else None
        self.state.attempt = self.checkpoints.begin_attempt()
        if self.saved:
            self.state.resume(self.saved)
        self.loop = AsyncLoop(
            config.rl, runtime, self.state, self.checkpoints, folder / "publish", Reporter(folder)
        )

    def go(self, new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> "Run":
        """Take every step."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(asyncio.wait_for(self.loop.run(self.saved), TIMEOUT_S))
        return self

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.folder / "metrics.jsonl")


def accounts_balance(run: Run, *, refused: bool = False) -> None:
    """Every sample made was trained on, dropped or filtered, or is left over; none is twice."""
    fates = run.state.ledger.to_json(1.0)["samples"]
    trained = run.runtime.trained
    assert len(trained) == len(set(trained)) == fates["trained"]
    left = sum(len(g.rollouts) for g in run.loop.exchange.buffer._groups)
    made = run.runtime.sampled
    assert made == fates["trained"] + fates["dropped"] + fates["filtered"] + left
    serials = Counter(i.split(".")[0] for i in trained)
    sizes = {4: True, 3: refused}  # whole groups, every ticket once
    assert all(sizes.get(n, False) for n in serials.values())
    if not refused:
        assert fates["trained"] == 8 * run.runtime.attempts_at_training and not fates["refused"]
    state = run.state.queue.state_dict()
    unfinished = {t["serial"] for t in (*state["open"], *state["waiting"])}
    closed = set(range(run.state.queue.dispatched)) - unfinished
    assert set(map(int, serials)) <= closed
    if not refused:
        assert len(closed) == len(serials) + fates["filtered"] // 4
