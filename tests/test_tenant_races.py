"""F-44: two hundred clients of one tenant at once, on real workers, while its quota changes, a worker is killed and clients leave.

What happened is written down by the engine's own beginning and end of each request, apart from the books that are under test.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import tiny_model
from gateway_client import event_of, serving
from test_engine import config, counter, picture, settled
from test_gateway_tenants import key

from mmserve import AsyncEngine
from mmserve.active_request import ActiveRequest
from mmserve.quota import Quota
from mmserve.request import FinishReason
from mmserve.tenant_watch import TenantWatch
from mmserve.tenants import TenantRecords
from scripts.loopback import image_part, text_part, user

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CLIENTS = 200
MAX_TOKENS = 24


@dataclass
class Life:
    tenant: str
    start_s: float
    limit: Quota | None  # when it began
    num_beside: int  # of the same tenant, with itself
    end_s: float = 0.0
    num_tokens: int = 0
    was_answered: bool = False


@dataclass
class History:
    lives: dict[str, Life] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)

    def of(self, tenant: str) -> list[Life]:
        return [life for life in self.lives.values() if life.tenant == tenant]


class ObservedEngine(AsyncEngine):
    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.history = History()

    def _activate(self, *args: Any) -> ActiveRequest:
        active = super()._activate(*args)
        tenant = active.request.tenant
        self.history.running[tenant] += 1
        self.history.lives[active.generation.request_id] = Life(
            tenant, time.monotonic(), self.tenants.quota(tenant), self.history.running[tenant]
        )
        return active

    def _end(self, active: ActiveRequest, reason: FinishReason) -> bool:
        is_first = super()._end(active, reason)
        if is_first:
            life = self.history.lives[active.generation.request_id]
            self.history.running[life.tenant] -= 1
            life.end_s = time.monotonic()
            life.was_answered = reason is FinishReason.LENGTH
            life.num_tokens = active.generation.usage.prompt_tokens + active.generation.usage.completion_tokens
        return is_first


@dataclass
class House:
    engine: ObservedEngine
    records: TenantRecords
    url: str
    http: aiohttp.ClientSession

    async def add(self, name: str, quota: Quota) -> str:
        presented = self.records.add(name, quota, "standard", has_private_cache=False)
        await self.until(lambda: self.engine.tenants.quota(name) == quota)
        return presented

    async def change(self, name: str, **quota: int) -> None:
        wanted = self.records.set(name, quota).quota
        await self.until(lambda: self.engine.tenants.quota(name) == wanted)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def asked(self, presented: str, i: int) -> AsyncIterator[aiohttp.ClientResponse]:
        """One of 40 questions, about one of eight pictures: while their headers are read, others come between."""
        messages = user(image_part(picture(i % 8).data), text_part(f"question number {i % 40}"))
        body = {"messages": messages, "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 5, "model": "small"}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=key(presented)) as response:
            yield response


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    model, data = tiny_model.build(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("data")
    settings = config(model, data)
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    with TenantWatch(settings.storage.ledger, interval_s=0.02) as watch, TenantRecords(settings.storage.ledger) as records:
        async with ObservedEngine(settings, tenants=watch) as engine, serving(engine) as server, http:  # type: ignore[arg-type]
            yield House(engine, records, server.url, http)


async def check_all_given_back(house: House, tenant: str) -> None:
    await house.until(lambda: not house.engine._active)
    await settled(house.engine)
    house.engine.quotas.check()
    book = house.engine.quotas._books[tenant]
    assert (book.num_running, book.num_reserved) == (0, 0)
    assert house.engine.history.running[tenant] == 0
    assert await asyncio.to_thread(house.engine.ledger.flush)
    db = sqlite3.connect(house.engine.ledger.path)
    (num_rows,) = db.execute("SELECT count(*) FROM inference_requests WHERE tenant_id = ?", [tenant]).fetchone()
    db.close()
    assert num_rows == len(house.engine.history.of(tenant))


async def test_never_more_than_ten_at_once_while_the_quota_changes_a_worker_dies_and_clients_leave(house: House) -> None:
    presented = await house.add("acme", Quota(concurrent_requests=10))
    statuses: Counter[int] = Counter()
    answers: dict[int, str] = {}
    left: set[int] = set()

    async def client(i: int) -> None:
        """Comes back until it is served.  Every eighth leaves after its first word."""
        while True:
            async with house.asked(presented, i) as response:
                statuses[response.status] += 1
                if response.status == 429:
                    assert response.headers["Retry-After"] == "1"
                    assert "x-ratelimit-remaining-requests" in response.headers
                elif i % 8 == 0:
                    await response.content.readline()
                    left.add(i)
                    response.close()
                    return
                else:
                    answers[i] = await response.text()
                    return
            await asyncio.sleep(0.05)  # sooner than it was told

    clients = [asyncio.create_task(client(i)) for i in range(NUM_CLIENTS)]
    history = house.engine.history
    await house.until(lambda: len(history.of("acme")) >= 30)
    os.kill(house.engine._groups["small"].supervisors[0].pid, signal.SIGKILL)
    await house.change("acme", concurrent_requests=3)
    await house.until(lambda: len(history.of("acme")) >= 60)
    await house.change("acme", concurrent_requests=10)
    async with asyncio.timeout(300):
        await asyncio.gather(*clients)

    lives = history.of("acme")
    assert len(lives) == statuses[200] == NUM_CLIENTS
    assert statuses[429] > 0
    assert set(statuses) == {200, 429}
    for life in lives:
        assert life.limit is not None
        assert life.num_beside <= life.limit.concurrent_requests
    assert max(life.num_beside for life in lives) == 10
    assert {life.limit.concurrent_requests for life in lives if life.limit is not None} == {3, 10}
    assert counter(house.engine, "stream_recoveries_total") > 0
    assert len(left) == NUM_CLIENTS // 8
    same: dict[int, str] = {}
    for i, answer in answers.items():
        *chunks, done = [event_of(block) for block in answer.split("\n\n") if block and not block.startswith(":")]
        assert done == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert same.setdefault(i % 40, text) == text
    await check_all_given_back(house, "acme")


async def test_no_minute_holds_more_tokens_than_the_quota(house: House) -> None:
    limit = 1500
    presented = await house.add("tokens", Quota(tokens_per_minute=limit))

    async def client(i: int) -> int:
        async with house.asked(presented, i) as response:
            remaining = int(response.headers["x-ratelimit-remaining-tokens"])
            assert 0 <= remaining <= limit
            if response.status == 429:
                assert 1 <= int(response.headers["Retry-After"]) <= 61
            elif i % 3 == 0:
                response.close()
            else:
                await response.read()
            return response.status

    start_s = time.monotonic()
    first = asyncio.create_task(asyncio.wait_for(asyncio.gather(*(client(i) for i in range(NUM_CLIENTS // 2))), 300))
    history = house.engine.history
    await house.until(lambda: len(history.of("tokens")) >= 5)
    os.kill(house.engine._groups["small"].supervisors[0].pid, signal.SIGKILL)
    statuses = Counter(await first)
    statuses.update(await asyncio.wait_for(asyncio.gather(*(client(i) for i in range(NUM_CLIENTS // 2))), 300))
    await check_all_given_back(house, "tokens")

    lives = history.of("tokens")
    most = max(life.num_tokens for life in lives)
    assert set(statuses) == {200, 429}
    assert statuses[200] == len(lives)
    for one in lives:  # all that touched the minute before each end
        in_minute = sum(life.num_tokens for life in lives if life.end_s > one.end_s - 60 and life.start_s <= one.end_s)
        assert in_minute <= limit
    if time.monotonic() - start_s < 60:  # nothing came back meanwhile: it was used up but for less than one request
        assert sum(life.num_tokens for life in lives) > limit - 2 * most
    now_s = time.monotonic()
    standing = house.engine.quotas.standing("tokens", now_s)
    assert standing is not None
    recent = [life for life in lives if life.end_s > now_s - 60]  # of those who left, some had used nothing yet
    assert sum(life.num_tokens for life in recent if life.was_answered) <= limit - standing.remaining_tokens
    assert sum(life.num_tokens for life in recent) >= limit - standing.remaining_tokens or len(recent) < len(lives)
