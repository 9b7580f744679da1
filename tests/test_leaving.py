"""Clients that leave, at every stage, over real sockets and the real engine with simulated cards: noticed at once, and all given back."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from test_engine import check_idle, settled
from test_gateway_rude import HEAD

from mmserve import AsyncEngine
from mmserve.config import from_mapping
from mmserve.gateway.server import Gateway
from scripts.loopback import image_part, scrape, text_part, user

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STORM = 500
LONG = {"max_tokens": 3000, "ignore_eos": True}


@dataclass(frozen=True)
class Served:
    engine: AsyncEngine
    url: str
    data_dir: Path

    @asynccontextmanager
    async def asked(self, messages: list[Any], **fields: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        body = json.dumps({"model": "small", "messages": messages} | LONG | fields).encode()
        writer.write(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            yield reader, writer
        finally:
            await leave(writer)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)

    async def count(self, name: str, **labels: str) -> float:
        return (await scrape(self.url)).total(name, labels)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    data_dir = tmp_path_factory.mktemp("data")
    settings = {"device": "sim:a100", "port": 0, "data_dir": data_dir, "max_num_seqs": 256, "max_num_queued_reqs": 1000}
    config = from_mapping(settings | {"max_queue_wait_s": 1000.0})
    async with AsyncEngine(config) as engine, Gateway(engine, config) as gateway:
        yield Served(engine, gateway.url, data_dir)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def everything_is_given_back(served: Served) -> AsyncIterator[None]:
    """And each request that was accepted is counted once, and has its row."""
    before = await served.count("request_success_total"), rows(served)
    yield
    await served.until(lambda: not served.engine._active)
    await settled(served.engine)
    check_idle(served.engine)
    ended = await served.count("request_success_total") - before[0]
    await served.until(lambda: rows(served) - before[1] == ended)


def rows(served: Served) -> int:
    with contextlib.closing(sqlite3.connect(served.data_dir / "ledger.db")) as connection:
        return int(connection.execute("select count(*) from inference_requests").fetchone()[0])


def picture(seed: int, size: int = 336) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return image_part(buffer.getvalue())


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def half_close(writer: asyncio.StreamWriter) -> None:
    """Documented as leaving: nobody can tell it from a client that is gone."""
    writer.write_eof()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("how", [leave, half_close, reset])
@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_middle_of_an_answer(served: Served, stream: bool, how: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    cancelled = await served.count("request_success_total", finished_reason="cancelled")
    async with served.asked(user(text_part("Tell me a story.")), stream=stream) as (_, writer):
        await served.until(lambda: any(active.generated_tokens > 3 for active in served.engine._active.values()))
        (active,) = served.engine._active.values()
        await how(writer)
        await served.until(lambda: not served.engine._active)
        num_generated = active.generated_tokens
        assert num_generated < 1000
    await settled(served.engine)
    assert active.generated_tokens == num_generated  # what was in flight is not counted any more
    assert await served.count("request_success_total", finished_reason="cancelled") == cancelled + 1


async def test_while_its_picture_is_decoded_or_encoded_and_those_who_share_the_batch_get_theirs(served: Served) -> None:
    """At many moments: each leaves a little later than the one before."""
    words = text_part("What is it?")

    async def stay(seed: int) -> bytes:
        async with served.asked(user(picture(seed), words), max_tokens=2) as (reader, _):
            return await reader.readuntil(b"\r\n\r\n")

    async def go(seed: int) -> None:
        async with served.asked(user(picture(seed), words)):
            await asyncio.sleep(0.004 * (seed % 12))

    answers, *_ = await asyncio.gather(asyncio.gather(*map(stay, range(8))), *map(go, range(4, 28)))
    assert [answer[:13] for answer in answers] == [b"HTTP/1.1 200 "] * 8


async def test_while_it_waits_in_the_queue(served: Served) -> None:
    """Behind 256 others that fill every place in a step."""
    async with contextlib.AsyncExitStack() as crowd:
        for _ in range(16):
            await crowd.enter_async_context(served.asked(user(text_part("Tell me a story.")), n=16))
        scheduler = next(iter(served.engine._groups["small"]._replicas)).scheduler
        await served.until(lambda: scheduler.num_running == 256)
        async with served.asked(user(text_part("And me?"))) as (_, writer):
            await served.until(lambda: scheduler.num_waiting == 1)
            waiting = [active for active in served.engine._active.values() if active.first_token_s is None]
            await leave(writer)
            await served.until(lambda: scheduler.num_waiting == 0)
        assert waiting[-1].choices[0].sequence.first_step_s is None
        assert scheduler.num_running == 256


async def test_in_the_middle_of_a_long_prefill(served: Served) -> None:
    text = base64.b64encode(np.random.default_rng(0).bytes(2300)).decode()
    async with served.asked(user(text_part(text))) as (_, writer):
        await served.until(lambda: any(active.choices[0].sequence.num_computed for active in served.engine._active.values()))
        (active,) = served.engine._active.values()
        await leave(writer)
        await served.until(lambda: not served.engine._active)
        assert active.generated_tokens < 100


async def test_all_at_once(served: Served) -> None:
    """500 of them, streaming and not, in the same turn of the loop."""
    cancelled = await served.count("request_success_total", finished_reason="cancelled")
    async with contextlib.AsyncExitStack() as crowd:
        writers = [
            (await crowd.enter_async_context(served.asked(user(text_part(f"Story {number}.")), stream=number % 2 == 0)))[1]
            for number in range(NUM_STORM)
        ]
        await served.until(lambda: len(served.engine._active) == NUM_STORM)
        for writer in writers:
            writer.transport.abort()
        await served.until(lambda: not served.engine._active)
    assert await served.count("request_success_total", finished_reason="cancelled") == cancelled + NUM_STORM
