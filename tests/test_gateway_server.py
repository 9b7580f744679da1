"""The server's life: starting, open, draining; and the pages that only show something."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
import uvloop
from fake_engine import FakeEngine, say_first_word, say_nothing
from gateway_client import chat, event_of, serving

from mmserve.config import Config, ServerConfig, from_mapping
from mmserve.gateway.server import Gateway
from mmserve.request import FinishReason
from mmserve.token_stream import Delta


async def test_while_the_model_loads_the_server_lives_but_is_not_ready() -> None:
    gateway = Gateway(FakeEngine(), Config(server=ServerConfig(port=0)))
    await gateway.bind()
    async with aiohttp.ClientSession() as http:
        async with http.get(gateway.url + "/health/live") as response:
            assert response.status == 200
        async with http.get(gateway.url + "/health/ready") as response:
            assert response.status == 503
            assert (await response.json())["status"] == "starting"
        async with http.post(gateway.url + "/v1/chat/completions", json=chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "2"
            assert (await response.json())["error"]["code"] == "loading"
        async with http.get(gateway.url + "/") as response:
            assert response.status == 200  # the playground is there, and says so itself
        gateway.open()
        async with http.post(gateway.url + "/v1/chat/completions", json=chat()) as response:
            assert response.status == 200
    await gateway.close()


async def test_readiness_can_be_asked_for_one_route() -> None:
    async with serving() as server:
        server.engine.not_ready = {"audio"}
        assert (await server.get("/health/ready"))[0] == 503
        assert (await server.get("/health"))[0] == 503
        assert (await server.get("/health/ready?route=audio"))[0] == 503
        status, body = await server.get("/health/ready?route=image")
        assert (status, body["status"]) == (200, "ready")
        assert body["works"] == {"all": False, "text": True, "image": True, "audio": False}
        assert (await server.get("/health/live"))[0] == 200
        assert (await server.get("/health/ready?route=video"))[0] == 400


async def test_draining_lets_nobody_in_and_those_inside_finish() -> None:
    engine = FakeEngine(say_first_word)
    async with (
        serving(engine, shutdown_timeout=30) as server,
        server.http.post(server.url + "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        (generation,) = engine.generations
        await response.content.readuntil(b'"It"')
        draining = asyncio.create_task(server.gateway.drain())
        await asyncio.sleep(0)
        assert (await server.get("/health/ready"))[0] == 503
        assert (await server.get("/health/live"))[0] == 200
        async with server.http.post(server.url + "/v1/chat/completions", json=chat()) as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"] == "5"
            assert refused.headers["Connection"] == "close"
            assert (await refused.json())["error"]["code"] == "shutdown"
        assert not draining.done()
        generation.push(Delta(0, " is", finish_reason=FinishReason.STOP))
        rest = (await response.read()).decode()
        await draining
    assert '" is"' in rest
    assert rest.endswith("data: [DONE]\n\n")
    assert engine.cancelled == []


async def test_at_the_deadline_a_stream_is_cut_off_with_an_error_event() -> None:
    engine = FakeEngine(say_first_word)
    async with (
        serving(engine, shutdown_timeout=0.05) as server,
        server.http.post(server.url + "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        await response.content.readuntil(b'"It"')
        await server.gateway.drain()
        text = (await response.read()).decode()
    events = [event_of(block) for block in text.split("\n\n") if block.startswith("data")]
    assert [event if event == "[DONE]" else event["error"]["code"] for event in events[-2:]] == ["shutdown", "[DONE]"]
    assert engine.cancelled == ["fake-0"]


async def test_a_second_signal_does_not_wait() -> None:
    engine = FakeEngine(say_nothing)
    async with serving(engine, shutdown_timeout=3600) as server:
        waiting = asyncio.create_task(server.post("/v1/chat/completions", chat()))
        await engine.wait_until(lambda: len(engine.generations) == 1)
        draining = asyncio.create_task(server.gateway.drain(linger_s=3600))
        await asyncio.sleep(0)
        server.gateway.hurry()
        await draining
        status, answer = await waiting
    assert (status, answer["error"]["code"]) == (503, "shutdown")


async def test_a_taken_port_is_an_error_before_any_model_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        gateway = Gateway(FakeEngine(), from_mapping({"port": other.getsockname()[1]}))
        with pytest.raises(OSError, match="in use"):
            await gateway.bind()


async def test_models_say_their_modalities_and_context_length() -> None:
    async with serving(served_model_name="my-model") as server:
        _, listed = await server.get("/v1/models")
        async with server.openai() as client:
            names = [model.id async for model in client.models.list()]
            one = await client.models.retrieve("small")
        status, answer = await server.get("/v1/models/other")
    assert names == ["my-model", "small", "large"]
    assert listed["data"][0]["modalities"] == ["text"]
    assert listed["data"][0]["context_length"] == 4096
    assert one.owned_by == "mmserve"
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_metrics_are_prometheus_text() -> None:
    async with serving() as server, server.http.get(server.url + "/metrics") as response:
        text = await response.text()
    assert response.content_type == "text/plain"
    assert "mmserve:kv_cache_usage_perc" in text


async def test_feedback_is_recorded_under_the_requests_own_id() -> None:
    async with serving() as server:
        status, _ = await server.post("/v1/feedback", {"request_id": "chatcmpl-fake-0", "rating": "up", "regenerated": True})
        assert status == 200
        (feedback,) = server.engine.ledger.feedback
        assert (feedback.request_id, feedback.tenant_id, feedback.rating, feedback.regenerated) == (
            "fake-0",
            "default",
            "up",
            True,
        )
        for body, param in (
            ({}, "request_id"),
            ({"request_id": "", "rating": "up"}, "request_id"),
            ({"request_id": "a" * 201, "rating": "up"}, "request_id"),
            ({"request_id": "a"}, "rating"),
            ({"request_id": "a", "rating": "meh"}, "rating"),
            ({"request_id": "a", "rating": "up", "regenerated": 1}, "regenerated"),
            ({"request_id": "a", "rating": "up", "stars": 5}, "stars"),
        ):
            status, answer = await server.post("/v1/feedback", body)
            assert (status, answer["error"]["param"]) == (400, param)
        assert len(server.engine.ledger.feedback) == 1


async def test_the_playground_loads_nothing_from_elsewhere() -> None:
    async with serving() as server:
        for path, content_type in (("/", "text/html"), ("/playground/app.js", "text/javascript"), ("/playground/style.css", "text/css")):
            async with server.http.get(server.url + path) as response:
                text = await response.text()
            assert (response.status, response.content_type) == (200, content_type)
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert "http://" not in text.replace("http://www.w3.org", "")
            assert "https://" not in text
        assert (await server.get("/playground/../server.py"))[0] == 404
        assert (await server.get("/playground/%2e%2e/server.py"))[0] == 404


def test_a_crowd_of_new_connections_is_let_in_within_a_few_turns_of_the_loop() -> None:
    """uvloop took one a turn.  Under load clients waited 9 s in the kernel's queue instead of being told to come back."""

    async def come() -> int:
        async with serving() as server:
            host, _, port = server.url.removeprefix("http://").partition(":")
            clients = [socket.create_connection((host, int(port))) for _ in range(60)]
            for _ in range(12):
                await asyncio.sleep(0)
            assert server.gateway._runner is not None
            assert server.gateway._runner.server is not None
            num_connections = len(server.gateway._runner.server.connections)
            for client in clients:
                client.close()
            return num_connections

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(come()) == 60
