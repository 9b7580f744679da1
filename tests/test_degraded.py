"""An answer without its media is never one silently: the prompt, the body, the first chunk and a header say so, over a real server too."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from encoder_world import ask, build_model, counter, picture, read, settled, until
from encoder_world import config as engine_config
from fake_engine import FakeEngine, say_words
from gateway_client import PNG, chat, serving
from hosted_service import hosted_service

from mmserve import AsyncEngine, ChatRequest
from mmserve.config import from_mapping
from mmserve.errors import EncoderUnavailable
from mmserve.gateway.server import Gateway
from mmserve.media import MediaItem, MediaKind
from mmserve.prompt_maker import INSTEAD, leave_out, notices
from mmserve.request import MediaNotice, Message
from mmserve.token_stream import Generation

NOTICE = {"kind": "image", "index": 0, "reason": "encoder_unavailable"}
HIDDEN = {"small": 64, "large": 96}


def with_picture(**fields: object) -> dict:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PNG}}]
    return {"messages": [{"role": "user", "content": content}], **fields}


def say_degraded(generation: Generation, request: ChatRequest) -> None:
    if request.allow_degraded:
        generation.degraded = (MediaNotice("image", 0, "encoder_unavailable"),)
    generation.fallback = (MediaNotice("audio", 0, "encoder_unavailable"),) if request.sampling.seed == 5 else ()
    say_words(generation, request)


def test_text_stands_where_an_item_was_left_out_and_notices_count_by_kind() -> None:
    first, clip, second = MediaItem(MediaKind.IMAGE, b"a"), MediaItem(MediaKind.AUDIO, b"b"), MediaItem(MediaKind.IMAGE, b"a")
    request = ChatRequest((Message("user", ("look: ", first, clip, second, "?")),))
    reasons = {id(clip): "encoder_nan", id(second): "worker_lost"}
    (message,) = leave_out(request, reasons).messages
    assert message.parts == ("look: ", first, INSTEAD[MediaKind.AUDIO], INSTEAD[MediaKind.IMAGE], "?")
    assert leave_out(request, reasons).media[0] is first  # the other picture has the same bytes
    assert notices(request, reasons) == (MediaNotice("audio", 0, "encoder_nan"), MediaNotice("image", 1, "worker_lost"))


async def test_the_body_says_what_was_left_out_though_nobody_asked_for_an_explanation() -> None:
    async with serving(FakeEngine(say_degraded)) as server:
        async with server.http.post(server.url + "/v1/chat/completions", json=with_picture(allow_degraded=True)) as response:
            assert response.headers["x-mmserve-degraded"] == "image"
            assert (await response.json())["mmserve"] == {"degraded": [NOTICE]}
        _, explained = await server.post("/v1/chat/completions", with_picture(allow_degraded=True, explain=True))
        assert explained["mmserve"]["degraded"] == [NOTICE]
        assert explained["mmserve"]["fused_tokens"] == 586
        async with server.http.post(server.url + "/v1/chat/completions", json=with_picture()) as response:
            assert "x-mmserve-degraded" not in response.headers
            assert "mmserve" not in await response.json()
        assert [request.allow_degraded for request in server.engine.requests] == [True, True, False]


async def test_an_answer_that_is_given_again_says_again_what_was_left_out() -> None:
    async with serving(FakeEngine(say_degraded)) as server:
        for _ in range(2):
            url, key = server.url + "/v1/chat/completions", {"Idempotency-Key": "one"}
            async with server.http.post(url, json=with_picture(allow_degraded=True), headers=key) as response:
                assert response.headers["x-mmserve-degraded"] == "image"
                assert (await response.json())["mmserve"] == {"degraded": [NOTICE]}
        assert len(server.engine.requests) == 1


async def test_the_first_chunk_of_a_stream_says_it_and_only_the_first() -> None:
    async with serving(FakeEngine(say_degraded)) as server:
        events = await server.events("/v1/chat/completions", with_picture(allow_degraded=True, stream=True, n=2))
        assert [event["mmserve"] for event in events[:-1] if "mmserve" in event] == [{"degraded": [NOTICE]}]
        assert events[0]["mmserve"] == {"degraded": [NOTICE]}


async def test_a_fallback_is_told_in_the_same_ways() -> None:
    async with (
        serving(FakeEngine(say_degraded)) as server,
        server.http.post(server.url + "/v1/chat/completions", json=with_picture(seed=5)) as response,
    ):
        assert response.headers["x-mmserve-fallback"] == "audio"
        assert (await response.json())["mmserve"] == {"fallback": [NOTICE | {"kind": "audio"}]}


async def test_forms_have_the_option_too_and_it_is_a_boolean() -> None:
    async with serving(FakeEngine(say_degraded)) as server:
        form = aiohttp.FormData()
        form.add_field("prompt", "what is <image-0>?")
        form.add_field("image", b"\x89PNG\r\n\x1a\n", filename="a.png", content_type="image/png")
        form.add_field("options", json.dumps({"allow_degraded": True}))
        async with server.http.post(server.url + "/v1/generate", data=form) as response:
            assert (await response.json())["mmserve"] == {"degraded": [NOTICE]}
        status, body = await server.post("/v1/chat/completions", chat(allow_degraded="yes"))
        assert (status, body["error"]["param"]) == (400, "allow_degraded")


async def test_a_hosted_encoder_in_every_mood_over_a_real_server(tmp_path: Path) -> None:
    """F-48: it answers; it is slow and sends 429, and requests are refused for as long as it says, or answered with a notice; text goes on;
    and it comes back by itself."""
    model = build_model(tmp_path / "model")
    async with hosted_service(HIDDEN) as service:
        settings = {"vision_url": service.url, "vision_version": "v1", "hosted_encoder_timeout_s": 5.0}
        config = engine_config(model, tmp_path / "data", **settings)
        engine = AsyncEngine(config)
        async with engine, Gateway(engine, from_mapping({"port": 0})) as gateway, aiohttp.ClientSession() as http:

            async def post(seed: int, **fields: object) -> tuple[int, dict, dict]:
                image = "data:image/png;base64," + base64.b64encode(picture(seed).data).decode()
                content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": image}}]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "model": "small", **fields}
                async with http.post(gateway.url + "/v1/chat/completions", json=body) as response:
                    return response.status, dict(response.headers), await response.json()

            async def ready(route: str) -> bool:
                async with http.get(f"{gateway.url}/health/ready", params={"route": route}) as response:
                    return response.status == 200

            status, _, body = await post(1)
            assert (status, body["usage"]["prompt_tokens_details"]["image_tokens"]) == (200, 16)
            assert not [role for supervisor in engine._media.supervisors if "image" in (role := supervisor.role)]  # no worker for it
            service.always = web.Response(status=429, headers={"Retry-After": "3"})
            status, headers, body = await post(2)
            assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "encoder_unavailable", "3")
            assert (await ready("image"), await ready("text"), await ready("audio")) == (False, True, True)
            num_asked = len(service.requests)
            status, headers, body = await post(3, allow_degraded=True)
            assert status == 200
            assert headers["x-mmserve-degraded"] == "image"
            assert body["mmserve"]["degraded"] == [NOTICE]
            assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 0
            status, headers, body = await post(4)
            assert (status, body["error"]["code"]) == (503, "encoder_unavailable")
            status, _, body = await post(1, allow_degraded=True)  # its rows are known
            assert (status, body["usage"]["prompt_tokens_details"]["image_tokens"], "mmserve" in body) == (200, 16, False)
            assert len(service.requests) == num_asked
            service.always = None
            async with asyncio.timeout(60):
                while not await ready("image"):
                    await asyncio.sleep(0.05)
            status, _, body = await post(4)
            assert (status, body["usage"]["prompt_tokens_details"]["image_tokens"]) == (200, 16)
            await settled(engine)


async def test_a_server_starts_without_its_hosted_encoder_and_takes_pictures_once_it_is_there(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model")
    async with hosted_service(HIDDEN) as service:
        service.always = 500
        config = engine_config(model, tmp_path / "data", vision_url=service.url, vision_version="v1")
        async with AsyncEngine(config) as engine:
            assert engine.ready("text")
            assert not engine.ready("image")
            with pytest.raises(EncoderUnavailable):
                await engine.submit(ask(picture(1), "?"))
            service.always = None
            await until(lambda: engine.ready("image"))
            generation = await engine.submit(ask(picture(1), "?"))
            assert len(await read(generation)) == 8
            assert generation.usage.media[0].source == "encoded"
            assert counter(engine, "degraded_media_total") == 0
            await settled(engine)
