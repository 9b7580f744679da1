"""Virtual time: waits cost nothing, orders are the same for a seed, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import time

import pytest

from mmserve.sim.virtual_time import run_in_virtual_time


async def finishing_order(waits_s: tuple[float, ...]) -> list[int]:
    order: list[int] = []

    async def wait(index: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(index)

    await asyncio.gather(*(wait(i, seconds) for i, seconds in enumerate(waits_s)))
    return order


def test_a_day_passes_in_a_moment() -> None:
    async def day() -> float:
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(86_400.0)
        return asyncio.get_running_loop().time() - began_s

    began_s = time.monotonic()
    assert run_in_virtual_time(day()) == pytest.approx(86_400.0)
    assert time.monotonic() - began_s < 1.0


def test_whoever_waits_less_is_first() -> None:
    assert run_in_virtual_time(finishing_order((3.0, 1.0, 2.0))) == [1, 2, 0]


def test_a_seed_decides_the_order_of_what_happens_at_nearly_the_same_time() -> None:
    def order(seed: int) -> list[int]:
        return run_in_virtual_time(finishing_order((1.0,) * 6), seed=seed, jitter_s=0.01)

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10


def test_timeouts_are_in_virtual_time() -> None:
    async def late() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(6.0)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(late()) == pytest.approx(5.0)


def test_waiting_for_what_never_comes_is_an_error() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer"):
        run_in_virtual_time(forever())
