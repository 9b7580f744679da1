"""`serve` from the first bind to the last signal, with real signals and the fake engine."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import re
import signal
import socket

import aiohttp
import pytest
from fake_engine import FakeEngine, say_nothing
from gateway_client import chat
from rich.console import Console

from mmserve.cli.serve import serve
from mmserve.config import from_mapping
from mmserve.request import FinishReason
from mmserve.token_stream import Delta


class StartingEngine(FakeEngine):
    """Started when the test says so; remembers that it was closed."""

    def __init__(self) -> None:
        super().__init__(say_nothing)
        self.may_start = asyncio.Event()
        self.starting = asyncio.Event()
        self.closed = False

    async def start(self) -> None:
        self.starting.set()
        await self.may_start.wait()

    async def close(self) -> None:
        self.closed = True


class Screen(io.StringIO):
    """What the terminal shows, and an event for when it shows the banner."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = asyncio.Event()

    def write(self, text: str) -> int:
        if "curl" in text:
            self.ready.set()
        return super().write(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_running_answer_finish_and_the_exit_is_clean(number: signal.Signals) -> None:
    engine, screen = StartingEngine(), Screen()
    engine.may_start.set()
    config = from_mapping({"port": 0, "shutdown_timeout": 0.5 if number is signal.SIGTERM else 30})
    serving = asyncio.create_task(serve(engine, config, Console(file=screen, width=120)))
    async with asyncio.timeout(20):
        await screen.ready.wait()
        match = re.search(r"http://127\.0\.0\.1:\d+", screen.getvalue())
        assert match is not None
        async with aiohttp.ClientSession() as http:
            waiting = asyncio.create_task(http.post(match[0] + "/v1/chat/completions", json=chat()))
            await engine.wait_until(lambda: len(engine.generations) == 1)
            os.kill(os.getpid(), number)
            engine.generations[0].push(Delta(0, "Done.", finish_reason=FinishReason.STOP))
            async with await waiting as response:
                assert response.status == 200
        assert await serving == 0
    assert engine.closed


async def test_a_signal_while_the_model_loads_ends_at_once() -> None:
    engine = StartingEngine()
    serving = asyncio.create_task(serve(engine, from_mapping({"port": 0}), Console(file=io.StringIO())))
    async with asyncio.timeout(20):
        await engine.starting.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0
    assert engine.closed


async def test_two_signals_do_not_wait_for_anybody() -> None:
    engine, screen = StartingEngine(), Screen()
    engine.may_start.set()
    serving = asyncio.create_task(serve(engine, from_mapping({"port": 0, "shutdown_timeout": 3600}), Console(file=screen, width=120)))
    async with asyncio.timeout(20):
        await screen.ready.wait()
        match = re.search(r"http://127\.0\.0\.1:\d+", screen.getvalue())
        assert match is not None
        async with aiohttp.ClientSession() as http:
            waiting = asyncio.create_task(http.post(match[0] + "/v1/chat/completions", json=chat()))
            await engine.wait_until(lambda: len(engine.generations) == 1)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            async with await waiting as response:
                assert response.status == 503
        assert await serving == 0


async def test_an_engine_that_cannot_start_is_closed_and_its_error_comes_out() -> None:
    class Broken(StartingEngine):
        async def start(self) -> None:
            raise RuntimeError("no weights")

    engine = Broken()
    with pytest.raises(RuntimeError, match="no weights"):
        await serve(engine, from_mapping({"port": 0}), Console(file=io.StringIO()))
    assert engine.closed


async def test_a_taken_port_is_found_before_the_engine_starts() -> None:
    engine = StartingEngine()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            await serve(engine, from_mapping({"port": other.getsockname()[1]}), Console(file=io.StringIO()))
    assert not engine.starting.is_set()


async def test_what_is_there_when_it_opens_is_no_work_for_the_garbage_collector() -> None:
    """A full collection looked at 70,000 objects that never go, and everybody's tokens waited for it."""
    engine, screen = StartingEngine(), Screen()
    serving = asyncio.create_task(serve(engine, from_mapping({"port": 0, "shutdown_timeout": 0}), Console(file=screen, width=120)))
    await engine.starting.wait()
    assert gc.get_freeze_count() == 0
    engine.may_start.set()
    async with asyncio.timeout(20):
        await screen.ready.wait()
        assert gc.get_freeze_count() > len(gc.get_objects())
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0
    assert gc.get_freeze_count() == 0
