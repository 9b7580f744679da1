"""Clocks that step and a loop that stands still: nobody is timed out, nothing expires, no worker is killed for it."""

from __future__ import annotations

import ast
import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from gateway_client import chat, event_of
from test_architecture import MODULES
from test_leaving import picture

from mmserve import AsyncEngine
from mmserve.config import from_mapping
from mmserve.gateway.server import Gateway
from scripts.loopback import scrape, text_part, user

# Where the wall clock may be read: to write down when something was, or to start a clock of our own.
MAY_ASK_THE_TIME = {
    "canary_records",  # when an operator decided
    "chat_template",  # a template may tell the model what day it is
    "clock",
    "encoders.disk_tier",  # names, and what diskcache keeps for itself
    "gateway.routes",  # when feedback came
    "gateway.state",  # `created`
    "tenants",  # when one was made
    "spool",  # the order of rows; never backwards
    "token_stream",  # `created`
}
NUM_STREAMS = 8


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    config = from_mapping({"device": "sim:a100", "port": 0, "data_dir": tmp_path})
    async with AsyncEngine(config) as engine, Gateway(engine, config) as gateway:
        yield gateway.url


async def stream(url: str, fields: dict[str, Any], begun: asyncio.Semaphore) -> list[Any]:
    async with aiohttp.ClientSession() as http, http.post(url + "/v1/chat/completions", json=fields) as response:
        head = await response.content.readuntil(b"\n\n")
        begun.release()
        text = (head + await response.read()).decode()
    return [event_of(block) for block in text.split("\n\n") if block.startswith("data")]


async def source_of(url: str, image: dict[str, Any]) -> str:
    body = {"messages": user(image, text_part("What is it?")), "max_tokens": 1, "explain": True, "model": "small"}
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.post(url + "/v1/chat/completions", json=body) as response:
        (item,) = (await response.json())["mmserve"]["media"]
        return str(item["source"])


def test_only_those_who_write_down_when_something_was_ask_the_wall_clock() -> None:
    def asks(path: Path) -> bool:
        names = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        return bool(names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"})

    doors = ("bench.", "cli.", "evals.", "sim.")
    assert {module for module, path in MODULES.items() if asks(path) and not module.startswith(doors)} <= MAY_ASK_THE_TIME


async def test_a_wall_clock_that_steps_ends_no_stream_and_no_entry(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour back, a day on, and to 1970 and back, while answers are under way."""
    body = chat("Tell me a story.", stream=True, max_tokens=150, ignore_eos=True, model="small")
    image, words = picture(1), []
    assert await source_of(server, image) == "encoded"
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(stream(server, body, begun)) for _ in range(NUM_STREAMS)]
    for _ in streams:
        await begun.acquire()
    real = time.time
    for step_s in (-3600.0, 86_400.0, -real(), 0.0):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: real() + step_s)
        words.append(await source_of(server, image))
        await asyncio.sleep(0.2)
    for events in await asyncio.gather(*streams):
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert set(words) <= {"kv", "memory", "disk"}


async def test_a_loop_that_stands_still_for_two_seconds_kills_no_worker_and_times_nobody_out(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A garbage collection or a host that is suspended: answers wait in pipes meanwhile, and every deadline seems to have passed."""
    body = chat("Tell me a story.", stream=True, max_tokens=150, ignore_eos=True, model="small")
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(stream(server, body, begun)) for _ in range(NUM_STREAMS)]
    for _ in streams:
        await begun.acquire()
    with caplog.at_level(logging.WARNING, "mmserve"):
        time.sleep(2.0)  # noqa: ASYNC251  # which is what this is about
        for events in await asyncio.gather(*streams):
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
    scraped = await scrape(server)
    assert scraped.total("worker_restarts_total") == 0
    assert scraped.total("event_loop_lag_seconds_sum") > 1.5
    assert any("stood still for" in record.getMessage() for record in caplog.records)
    assert not any("killing" in record.getMessage() for record in caplog.records)
