"""Concurrency follows the measured cache: a quarter up, a tenth or half down, and only where it
binds; nobody is lost at the gate."""

import asyncio

import pytest

from configs.schema.rl_engines import Concurrency
from tasks.sampling.vllm_concurrency import SETTLE, ConcurrencyLimit, Gate


def settled(limit: ConcurrencyLimit, kv_use: float, running: int) -> int:
    """The limit after one move's worth of equal measurements."""
    for _ in range(SETTLE):
        limit.observe(kv_use, running)
    return limit.limit


@pytest.mark.parametrize(
    ("kv_use", "running", "expected"),
    [
        (0.59, 40, 50),  # x 1.25
        (0.59, 39, 40),  # does not bind
        (0.60, 40, 40),  # the band in between
        (0.79, 40, 40),
        (0.80, 40, 36),  # x 0.9
        (0.89, 40, 36),
        (0.90, 40, 20),  # halved
        (1.00, 7, 20),
        (0.95, 41, 40),  # too many still run: they end first
    ],
)
def test_one_move(kv_use, running, expected):
    assert settled(ConcurrencyLimit(40, 64, Concurrency()), kv_use, running) == expected


def test_it_stays_between_one_and_the_ceiling():
    limit = ConcurrencyLimit(1, 5, Concurrency())
    assert settled(limit, 1.0, 1) == 1
    assert [settled(limit, 0.1, 99) for _ in range(6)] == [2, 3, 4, 5, 5, 5]


def test_it_waits_for_a_move_to_show():
    limit = ConcurrencyLimit(40, 100, Concurrency())
    moves = [limit.observe(0.1, 100) for _ in range(2 * SETTLE)]
    assert moves == [40] * (SETTLE - 1) + [50] * SETTLE + [62]


def test_it_finds_the_band_of_a_cache_that_fills_linearly():
    """64 requests fill the cache: the limit ends between 0.6 and 0.8 of it and stays."""
    limit = ConcurrencyLimit(8, 256, Concurrency())
    trail = [settled(limit, limit.limit / 64, limit.limit) for _ in range(40)]
    assert trail[-1] == trail[-20] and 0.6 * 64 <= trail[-1] < 0.8 * 64


def test_settings_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"back_off_at=0\.5 .* must rise"):
        Concurrency(back_off_at=0.5)


def test_the_gate_lets_in_first_come_first_served_and_loses_nobody():
    async def scenario() -> None:
        gate = Gate(2)
        order: list[int] = []

        async def visitor(number: int) -> None:
            await gate.enter()
            order.append(number)

        tasks = [asyncio.create_task(visitor(i)) for i in range(6)]
        await asyncio.sleep(0)
        assert order == [0, 1] and (gate.running, gate.waiting) == (2, 4)
        tasks[2].cancel()  # gives up while waiting
        await asyncio.sleep(0)
        assert gate.waiting == 3
        gate.leave()
        gate.leave()
        tasks[3].cancel()  # let in and cancelled at the same moment: the place goes on
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [0, 1, 4, 5] and (gate.running, gate.waiting) == (2, 0)
        gate.resize(1)
        assert gate.running == 2  # nobody is sent out
        late = asyncio.create_task(visitor(6))
        await asyncio.sleep(0)
        gate.leave()
        await asyncio.sleep(0)
        assert not late.done() and gate.running == 1
        gate.leave()
        await late
        assert order[-1] == 6 and gate.running == 1

    asyncio.run(scenario())
