"""Tenants at the door, over real sockets: whose key it is, what that means for the request, and what every answer says about the quota."""

from __future__ import annotations

import asyncio
import base64
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from fake_engine import FakeEngine, say_first_word
from gateway_client import Server, chat, serving
from test_engine import check_idle, picture
from test_tenants import until

from mmserve import AsyncEngine, Config
from mmserve.config import ConfigError, ModelConfig, SchedulerConfig, ServerConfig, StorageConfig
from mmserve.gateway.guard import check_binding
from mmserve.quota import Quota, Standing
from mmserve.request import FinishReason
from mmserve.tenant_watch import TenantWatch
from mmserve.tenants import TIERS, Tenant, TenantRecords, Tenants, key_hash
from mmserve.token_stream import Delta
from scripts.loopback import image_part, server, user

CHAT = "/v1/chat/completions"


def tenant(name: str, tokens_per_minute: int = 0, concurrent_requests: int = 0, **fields: Any) -> Tenant:
    """Its key is its name."""
    return Tenant(name, Quota(tokens_per_minute, concurrent_requests), key_hash=key_hash(name), **fields)


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


@asynccontextmanager
async def serving_tenants(*tenants: Tenant, engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Server]:
    engine = engine or FakeEngine()
    engine.tenants.roll = engine.tenants.roll.next(tenants)
    async with serving(engine, **settings) as server:
        yield server


# --- who it is ---------------------------------------------------------------------------------------------------------------


async def test_with_tenants_every_route_but_health_needs_a_key_of_theirs_or_the_operators() -> None:
    async with serving_tenants(tenant("acme"), api_key="operator") as server:
        for path in ("/", "/metrics", "/v1/models", "/nowhere", "/playground/app.js", "//health"):
            for headers, refused in (({}, True), (key("wrong"), True), (key("acme"), False), (key("operator"), False)):
                async with server.http.get(server.url + path, headers=headers) as response:
                    assert (response.status == 401) == refused, (path, headers)
        for path in ("/health", "/health/live", "/health/ready"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200, path
        for presented in ("", "Bearer ", f"Bearer {key_hash('acme')}", "Basic !!", "acme", "Digest acme"):
            assert (await server.get("/v1/models", headers={"Authorization": presented}))[0] == 401, presented
        basic = base64.b64encode(b"anybody:acme").decode()
        assert (await server.get("/v1/models", headers={"Authorization": f"Basic {basic}"}))[0] == 200


async def test_tenants_alone_are_enough_to_need_a_key() -> None:
    async with serving_tenants(tenant("acme")) as server:
        assert (await server.get("/v1/models"))[0] == 401
        assert (await server.post(CHAT, chat()))[0] == 401
        assert (await server.post(CHAT, chat(), headers=key("acme")))[0] == 200
        _, document = await server.get("/openapi.json", headers=key("acme"))
        assert document["security"]
        # With keys it may have a name of its own.
        assert (await server.get("/v1/models", headers={"Host": "mm.example", **key("acme")}))[0] == 200


@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/v1/generate"])
async def test_a_request_carries_its_tenant_priority_and_salt(route: str) -> None:
    salt = "5a" * 16
    async with serving_tenants(tenant("acme", tier="batch", cache_salt=salt), tenant("plain"), api_key="operator") as server:
        for who in ("acme", "plain", "operator"):
            if route == "/v1/generate":
                form = aiohttp.FormData({"prompt": "Hi", "options": '{"priority": 3, "cache_salt": "mine"}'}, default_to_multipart=True)
                async with server.http.post(server.url + route, data=form, headers=key(who)) as response:
                    assert response.status == 200
            else:
                fields = {"priority": 3, "cache_salt": "mine"}
                body = chat(**fields) if route == CHAT else {"prompt": "Hi", **fields}
                assert (await server.post(route, body, headers=key(who)))[0] == 200
    assert [(request.tenant, request.priority, request.cache_salt) for request in server.engine.requests] == [
        ("acme", TIERS["batch"] + 3, salt + "mine"),
        ("plain", 3, "mine"),
        ("default", 3, "mine"),
    ]


async def test_a_requests_own_priority_can_only_put_it_behind_its_tier() -> None:
    assert TIERS["premium"] < TIERS["standard"] < TIERS["batch"]
    async with serving_tenants(tenant("acme", tier="premium"), api_key="operator") as server:
        assert (await server.post(CHAT, chat(), headers=key("acme")))[0] == 200
        assert (await server.post(CHAT, chat(priority=50), headers=key("acme")))[0] == 200
        status, answer = await server.post(CHAT, chat(priority=-1), headers=key("acme"))
        assert (status, answer["error"]["param"]) == (400, "priority")
        assert (await server.post(CHAT, chat(priority=-1), headers=key("operator")))[0] == 200
    assert [request.priority for request in server.engine.requests] == [-100, -50, -1]


async def test_feedback_is_its_tenants() -> None:
    async with serving_tenants(tenant("acme"), tenant("other")) as server:
        for who in ("acme", "other"):
            assert (await server.post("/v1/feedback", {"request_id": "r", "rating": "up"}, headers=key(who)))[0] == 200
    assert [row.tenant_id for row in server.engine.ledger.feedback] == ["acme", "other"]


async def test_tenants_come_and_go_while_the_server_runs_and_it_never_falls_open(tmp_path: Path) -> None:
    """Added, rotated, removed by the command line's own code: the key's word counts within a second, a stream that runs goes on."""
    path = tmp_path / "ledger.db"
    with TenantWatch(path, interval_s=0.02) as watch, TenantRecords(path) as records:
        engine = FakeEngine(say_first_word)
        engine.tenants = watch
        async with serving(engine) as server:

            async def status(presented: str | None) -> int:
                return (await server.get("/v1/models", headers={} if presented is None else key(presented)))[0]

            assert await status(None) == 200
            first = records.add("acme", Quota(), "standard", has_private_cache=False)
            await asyncio.to_thread(until, lambda: key_hash(first) in watch.roll.by_key)
            assert (await status(None), await status(first)) == (401, 200)
            async with server.http.post(server.url + CHAT, json=chat(stream=True), headers=key(first)) as stream:
                await stream.content.readline()
                second = records.rotate("acme")
                await asyncio.to_thread(until, lambda: key_hash(second) in watch.roll.by_key)
                assert (await status(first), await status(second)) == (401, 200)
                records.remove("acme")
                await asyncio.to_thread(until, lambda: not watch.roll.by_key)
                assert (await status(None), await status(first), await status(second)) == (401, 401, 401)
                engine.generations[0].push(Delta(0, " ends", finish_reason=FinishReason.STOP))
                assert (await stream.content.read()).endswith(b"data: [DONE]\n\n")


def test_tenants_allow_to_listen_beyond_loopback() -> None:
    with pytest.raises(ConfigError, match="mmserve tenants add"):
        check_binding(ServerConfig(host="0.0.0.0"), Tenants())
    check_binding(ServerConfig(host="0.0.0.0"), Tenants(tenant("acme")))
    with pytest.raises(ConfigError):  # nobody could come in, and nobody is kept out
        check_binding(ServerConfig(host="0.0.0.0"), Tenants(Tenant("keyless", Quota(1, 1))))


# --- what answers say --------------------------------------------------------------------------------------------------------


def limits_of(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower().startswith("x-ratelimit-")}


async def test_every_answer_to_a_limited_tenant_says_how_it_stands_and_no_other_does() -> None:
    engine = FakeEngine()
    async with serving_tenants(
        tenant("acme", 1000, 4), tenant("tokens", 500), tenant("places", 0, 2), tenant("free"), engine=engine, api_key="operator"
    ) as server:
        engine.quotas.settle(engine.quotas.reserve("acme", num_prompt=100, num_answer=1, now_s=time.monotonic()), 100, time.monotonic())
        engine.quotas.reserve("acme", num_prompt=200, num_answer=50, now_s=time.monotonic())
        all_six = {
            "x-ratelimit-limit-requests": "4",
            "x-ratelimit-remaining-requests": "3",
            "x-ratelimit-reset-requests": "0s",
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-remaining-tokens": "650",
            "x-ratelimit-reset-tokens": "61s",
        }
        for method, path, body, status in (
            ("GET", "/v1/models", None, 200),
            ("GET", "/nowhere", None, 404),
            ("GET", CHAT, None, 405),
            ("POST", CHAT, chat(), 200),
            ("POST", CHAT, chat(stream=True), 200),
            ("POST", CHAT, {"messages": 1}, 400),
            ("POST", CHAT, chat(model="none"), 404),
        ):
            async with server.http.request(method, server.url + path, json=body, headers=key("acme")) as response:
                assert response.status == status, path
                assert limits_of(response.headers) == all_six, path
        for who, names in (("tokens", {"tokens"}), ("places", {"requests"}), ("free", set()), ("operator", set()), ("wrong", set())):
            async with server.http.get(server.url + "/v1/models", headers=key(who)) as response:
                assert {name.rpartition("-")[2] for name in limits_of(response.headers)} == names, who
        async with server.http.get(server.url + "/health", headers=key("acme")) as response:
            assert limits_of(response.headers) == {}


async def test_over_its_limit_a_tenant_is_refused_before_its_body_is_read() -> None:
    engine = FakeEngine()
    async with serving_tenants(tenant("acme", 0, 1), tenant("other", 0, 1), engine=engine) as server:
        running = engine.quotas.reserve("acme", num_prompt=1, num_answer=1, now_s=0.0)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20000000\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(f"{head}Authorization: Bearer acme\r\n\r\n".encode())  # and nothing of the body
        async with asyncio.timeout(20):
            answer = (await reader.readuntil(b"}")).decode()
        writer.close()
        assert " 429 Too Many Requests\r\n" in answer
        assert re.search(r"(?i)\r\nretry-after: 1\r\n", answer)
        assert re.search(r"(?i)\r\nx-ratelimit-remaining-requests: 0\r\n", answer)
        assert '"code":"rate_limit_exceeded"' in answer
        assert (await server.post(CHAT, chat(), headers=key("other")))[0] == 200
        engine.quotas.settle(running, 2, 0.0)
        assert (await server.post(CHAT, chat(), headers=key("acme")))[0] == 200


async def test_openai_client_gets_its_own_error_and_the_headers() -> None:
    engine = FakeEngine()
    async with serving_tenants(tenant("acme", 0, 1), engine=engine) as server, server.openai("acme") as client:
        engine.quotas.reserve("acme", num_prompt=1, num_answer=1, now_s=0.0)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["x-ratelimit-limit-requests"] == "1"


# --- what a request costs ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def simulated(directory: Path, *tenants: Tenant, **scheduler: Any) -> AsyncIterator[tuple[AsyncEngine, Server]]:
    """The real engine, on a device that answers without computing."""
    config = Config(
        model=ModelConfig(device="sim:a100"),
        scheduler=SchedulerConfig(max_queue_wait_s=3600, **scheduler),
        storage=StorageConfig(data_dir=directory),
    )
    async with AsyncEngine(config, tenants=Tenants(*tenants)) as engine, serving(engine) as server:  # type: ignore[arg-type]
        yield engine, server


def standing(engine: AsyncEngine, name: str = "acme") -> Standing:
    found = engine.quotas.standing(name, time.monotonic())
    assert found is not None
    return found


async def idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(60):
        while engine._active or any(
            replica.scheduler.num_in_flight or replica.kv.usage for group in engine._groups.values() for replica in group._replicas
        ):
            await asyncio.sleep(0.01)
    check_idle(engine)
    engine.quotas.check()
    assert all(book.num_running == book.num_reserved == 0 for book in engine.quotas._books.values())


async def test_answers_cost_what_they_used_and_refusals_nothing(tmp_path: Path) -> None:
    async with simulated(tmp_path, tenant("acme", 10_000, 4)) as (engine, server):
        status, answer = await server.post(CHAT, chat(max_tokens=20, n=3), headers=key("acme"))
        assert status == 200
        used = answer["usage"]["total_tokens"]
        assert used == answer["usage"]["prompt_tokens"] + 60
        assert standing(engine).remaining_tokens == 10_000 - used
        for body, status in (
            (chat(max_tokens=-1), 400),
            (chat(model="none"), 404),
            (chat(max_tokens=10**6), 400),
            ({"messages": user(image_part(b"no picture"))}, 422),
            (chat(max_tokens=1000, n=16), 413),
        ):
            assert (await server.post(CHAT, body, headers=key("acme")))[0] == status
        assert standing(engine).remaining_tokens == 10_000 - used
        await idle(engine)


async def test_more_than_a_minutes_tokens_is_a_413_with_both_numbers_and_an_open_end_is_shortened(tmp_path: Path) -> None:
    async with simulated(tmp_path, tenant("acme", 120)) as (engine, server):
        status, answer = await server.post(CHAT, chat(max_tokens=200), headers=key("acme"))
        assert (status, answer["error"]["param"]) == (413, "max_tokens")
        told = re.fullmatch(
            r"this key may use 120 tokens a minute, but (\d+) were requested \((\d+) in the prompt, 200 for the answer\)",
            answer["error"]["message"],
        )
        assert told is not None
        assert int(told[1]) == int(told[2]) + 200
        status, answer = await server.post(CHAT, chat(), headers=key("acme"))
        assert status == 200
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]) == ("length", 120)
        async with server.http.post(server.url + CHAT, json=chat(), headers=key("acme")) as response:
            assert response.status == 429
            assert 50 <= int(response.headers["Retry-After"]) <= 61
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"
        sample = ("mmserve:admission_rejections_total", {"reason": "rate_limit_exceeded"})
        assert engine.metrics.registry.get_sample_value(*sample) == 1
        await idle(engine)


async def test_a_client_that_leaves_while_it_is_queued_gets_everything_back_and_later_only_what_was_not_used(tmp_path: Path) -> None:
    async with simulated(tmp_path, tenant("acme", 50_000, 2), max_num_seqs=1) as (engine, server):
        running = await server.http.post(server.url + CHAT, json=chat(max_tokens=2000, stream=True), headers=key("acme"))
        await running.content.readline()
        queued = asyncio.create_task(server.post(CHAT, chat(max_tokens=2000), headers=key("acme")))
        async with asyncio.timeout(60):
            while standing(engine).remaining_requests:
                await asyncio.sleep(0.01)
        one = (50_000 - standing(engine).remaining_tokens) // 2
        queued.cancel()
        async with asyncio.timeout(60):
            while not standing(engine).remaining_requests:
                await asyncio.sleep(0.01)
        assert one > 2000
        assert standing(engine).remaining_tokens == 50_000 - one
        running.close()
        await idle(engine)
        assert 50_000 - 2000 < standing(engine).remaining_tokens < 50_000


async def test_a_request_that_waits_for_room_for_its_picture_holds_its_place_and_gives_it_back(tmp_path: Path) -> None:
    async with simulated(tmp_path, tenant("acme", 5000, 1)) as (engine, server):
        room = engine._media.room
        await room.take(room.num_bytes)
        body = {"messages": user(image_part(picture(1).data)), "max_tokens": 5}
        waiting = asyncio.create_task(server.post(CHAT, body, headers=key("acme")))
        async with asyncio.timeout(60):
            while not room._queue:
                await asyncio.sleep(0.01)
        assert (await server.post(CHAT, body, headers=key("acme")))[0] == 429
        waiting.cancel()
        async with asyncio.timeout(60):
            while not standing(engine).remaining_requests:
                await asyncio.sleep(0.01)
        assert standing(engine).remaining_tokens == 5000
        room.give_back(room.num_bytes)
        assert (await server.post(CHAT, body, headers=key("acme")))[0] == 200
        await idle(engine)


async def test_the_wall_clock_means_nothing_to_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with simulated(tmp_path, tenant("acme", 1000, 4)) as (engine, server):
        assert (await server.post(CHAT, chat(max_tokens=200), headers=key("acme")))[0] == 200
        now = time.time
        for step_s in (86_400, -3600):
            monkeypatch.setattr(time, "time", lambda step_s=step_s: now() + step_s)
            before = standing(engine).remaining_tokens
            status, answer = await server.post(CHAT, chat(max_tokens=200), headers=key("acme"))
            assert status == 200
            assert standing(engine).remaining_tokens == before - answer["usage"]["total_tokens"]
        await idle(engine)


async def test_a_shutdown_gives_everything_back(tmp_path: Path) -> None:
    async with simulated(tmp_path, tenant("acme", 50_000, 4)) as (engine, server):
        streams = [
            await server.http.post(server.url + CHAT, json=chat(max_tokens=2000, stream=True), headers=key("acme")) for _ in range(4)
        ]
        assert standing(engine).remaining_requests == 0
        await engine.drain(0.0)
        assert standing(engine).remaining_requests == 4
        for stream in streams:
            assert (await stream.content.read()).endswith(b"data: [DONE]\n\n")
        await idle(engine)


# --- all of it ---------------------------------------------------------------------------------------------------------------


async def test_a_server_takes_in_what_the_command_line_changes_while_it_runs(tmp_path: Path) -> None:
    async def command(*words: str) -> str:
        arguments = ("-m", "mmserve", "tenants", *words, "--data-dir", str(tmp_path))
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert process.returncode == 0
        return said.decode().strip()

    async with server(tmp_path, "--device", "sim:a100") as url, aiohttp.ClientSession() as http:

        async def ask(presented: str | None) -> tuple[int, dict[str, str]]:
            headers = {} if presented is None else key(presented)
            async with http.post(url + CHAT, json=chat(max_tokens=1), headers=headers) as response:
                await response.read()
                return response.status, limits_of(response.headers)

        async def until_asked(status: int, presented: str | None) -> None:
            async with asyncio.timeout(60):
                while (await ask(presented))[0] != status:
                    await asyncio.sleep(0.05)

        assert await ask(None) == (200, {})
        acme = await command("add", "acme", "--concurrent-requests", "1")
        await until_asked(401, None)
        async with http.post(url + CHAT, json=chat(max_tokens=4000, stream=True), headers=key(acme)) as stream:
            await stream.content.readline()
            assert (await ask(acme))[0] == 429
            await command("set", "acme", "--concurrent-requests", "2", "--tokens-per-minute", "100000")
            await until_asked(200, acme)
            _, limits = await ask(acme)
            assert (limits["x-ratelimit-limit-requests"], limits["x-ratelimit-limit-tokens"]) == ("2", "100000")
            other = await command("rotate", "acme")
            await until_asked(401, acme)
            assert (await ask(other))[0] == 200
            await command("remove", "acme")
            await until_asked(401, other)
            assert await ask(None) == (401, {})
