"""Signals to a real server: who is inside finishes, who comes is sent elsewhere, and no process is left, whenever they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_client import chat, event_of

from scripts.faults.family import children, gone
from scripts.loopback import Running, free_port, running

NUM_STREAMS = 32
PATH = "/v1/chat/completions"


@asynccontextmanager
async def streaming(server: Running, num_tokens: int) -> AsyncIterator[list[aiohttp.ClientResponse]]:
    """Each has said something.  `num_tokens` at some 12 ms."""
    body = chat("Tell me a story.", stream=True, max_tokens=num_tokens, ignore_eos=True, model="small")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(http.post(server.url + PATH, json=body)) for _ in range(NUM_STREAMS)]
        for stream in streams:
            assert stream.status == 200
            await stream.content.readuntil(b"\n\n")
        yield streams


async def rest_of(streams: Sequence[aiohttp.ClientResponse]) -> list[list[Any]]:
    texts = [(await stream.read()).decode() for stream in streams]
    return [[event_of(block) for block in text.split("\n\n") if block.startswith("data")] for text in texts]


async def status_of(url: str, body: Any = None) -> tuple[int, str, str]:
    """(status, Retry-After, error code), each on a connection of its own."""
    async with aiohttp.ClientSession() as http, http.request("GET" if body is None else "POST", url, json=body) as response:
        answer = json.loads(await response.read())
        return response.status, response.headers.get("Retry-After", ""), answer.get("error", {}).get("code", "")


async def ended(process: asyncio.subprocess.Process, timeout_s: float = 60) -> int:
    return await asyncio.wait_for(process.wait(), timeout_s)


async def test_sigterm_lets_32_streams_finish_while_newcomers_are_sent_elsewhere(tmp_path: Path) -> None:
    async with running(tmp_path, "--device", "sim:a100") as server:
        family = [child.pid for child in children(server.process.pid)]
        async with streaming(server, 250) as streams:
            server.process.send_signal(signal.SIGTERM)
            while (await status_of(server.url + "/health/ready"))[0] == 200:
                await asyncio.sleep(0.01)
            assert await status_of(server.url + PATH, chat()) == (503, "5", "shutdown")
            assert (await status_of(server.url + "/health/live"))[0] == 200
            answers = await rest_of(streams)
        assert [answer[-1] for answer in answers] == ["[DONE]"] * NUM_STREAMS
        assert [answer[-2]["choices"][0]["finish_reason"] for answer in answers] == ["length"] * NUM_STREAMS
        assert await ended(server.process) == 0
        assert (await gone(family, timeout_s=30))[0] == set()


async def test_a_sigterm_to_the_whole_group_ends_no_worker_while_somebody_is_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd sends it to every process of a service.  A thread of OpenBLAS, started before a worker's first line, had not blocked it."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    async with running(tmp_path, "--device", "sim:a100") as server:
        family = {child.pid for child in children(server.process.pid)}
        async with streaming(server, 250) as streams:
            for pid in (*family, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(1.0)
            assert {child.pid for child in children(server.process.pid)} == family
            answers = await rest_of(streams)
        assert [answer[-1] for answer in answers] == ["[DONE]"] * NUM_STREAMS
        assert await ended(server.process) == 0
        assert (await gone(family, timeout_s=30))[0] == set()


async def test_sigterm_to_an_idle_server_leaves_load_balancers_time_to_see_it(tmp_path: Path) -> None:
    async with running(tmp_path, "--device", "sim:a100") as server:
        loop = asyncio.get_running_loop()
        server.process.send_signal(signal.SIGTERM)
        began_s, refused = loop.time(), []
        with contextlib.suppress(aiohttp.ClientConnectionError):
            while True:
                refused.append(await status_of(server.url + PATH, chat(max_tokens=1)))
        assert loop.time() - began_s >= 1.9  # a little of the two seconds may have passed before the first look at the clock
        assert set(refused[5:]) == {(503, "5", "shutdown")}
        assert await ended(server.process) == 0


async def test_at_the_deadline_the_rest_is_cut_off_with_an_error_event(tmp_path: Path) -> None:
    async with running(tmp_path, "--device", "sim:a100", "--shutdown-timeout", "2.5") as server:
        async with streaming(server, 3000) as streams:
            server.process.send_signal(signal.SIGTERM)
            answers = await rest_of(streams)
        assert [answer[-1] for answer in answers] == ["[DONE]"] * NUM_STREAMS
        assert [answer[-2]["error"]["code"] for answer in answers] == ["shutdown"] * NUM_STREAMS
        assert await ended(server.process) == 0


async def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    async with running(tmp_path, "--device", "sim:a100", "--shutdown-timeout", "3600") as server:
        family = [child.pid for child in children(server.process.pid)]
        async with streaming(server, 3000) as streams:
            server.process.send_signal(signal.SIGTERM)
            while (await status_of(server.url + "/health/ready"))[0] == 200:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            answers = await rest_of(streams)
        assert [answer[-2]["error"]["code"] for answer in answers] == ["shutdown"] * NUM_STREAMS
        assert await ended(server.process) == 0
        assert (await gone(family, timeout_s=30))[0] == set()


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
@pytest.mark.parametrize("moment", ["at once", "loading", "workers", "a while later"])
async def test_a_signal_during_the_start_ends_it_and_leaves_nobody(
    tmp_path: Path, moment: str, signals: tuple[signal.Signals, ...]
) -> None:
    """With the bundled model.  Each of four workers that loaded was given two seconds to listen, one after the other."""
    arguments = ("-m", "mmserve", "serve", "--port", str(free_port()), "--data-dir", str(tmp_path))
    with (tmp_path / "server.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=log, stderr=log)
    family: set[int] = set()
    try:
        async with asyncio.timeout(60):
            while not is_time(moment, tmp_path / "server.log", process.pid):
                await asyncio.sleep(0.005)
        await asyncio.sleep(1.0 if moment == "a while later" else 0)
        for number in signals:
            family |= {child.pid for child in children(process.pid)}
            process.send_signal(number)
            await asyncio.sleep(0.05)
            if process.returncode is not None:
                break
        status = await ended(process, 30)
        # Before anything listens to signals they end it as they are, or as Python makes of them (1).
        assert status in ((0, 1, -signals[0]) if moment == "at once" else (0,))
        assert (await gone(family, timeout_s=30))[0] == set()
        assert b"Traceback" not in (tmp_path / "server.log").read_bytes() or moment == "at once"
    finally:
        if process.returncode is None:
            process.kill()


def is_time(moment: str, log: Path, pid: int) -> bool:
    match moment:
        case "at once":
            return True
        case "loading":
            return b"loading model" in log.read_bytes()
    return len(children(pid)) >= 3
