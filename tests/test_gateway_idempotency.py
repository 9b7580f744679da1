"""A request that is sent again under its key: one generation, and the same answer for everybody who asks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import FakeEngine, say_first_word, say_nothing
from gateway_client import PNG, Server, chat, event_of, serving

from mmserve.errors import Overloaded
from mmserve.gateway import idempotency
from mmserve.gateway.idempotency import Answers
from mmserve.request import ChatRequest, FinishReason, Message
from mmserve.token_stream import Delta

KEY = {"Idempotency-Key": "order-66"}
PATH = "/v1/chat/completions"


async def ask(server: Server, body: Any, headers: dict[str, str] = KEY, path: str = PATH) -> tuple[int, Any, bool]:
    """(status, answer or events, whether it was a repeat)"""
    async with server.http.post(server.url + path, json=body, headers=headers) as response:
        is_repeat = response.headers.get("Idempotent-Replayed") == "true"
        if response.content_type == "application/json":
            return response.status, await response.json(), is_repeat
        blocks = (await response.read()).decode().split("\n\n")
        return response.status, [event_of(block) for block in blocks if block and not block.startswith(":")], is_repeat


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_sent_again_gets_the_same_answer_and_is_generated_once(stream: bool) -> None:
    async with serving() as server:
        first = await ask(server, chat(stream=stream, logprobs=True, n=2))
        again = await ask(server, chat(stream=stream, logprobs=True, n=2))
        assert len(server.engine.requests) == 1
    assert (first[2], again[2]) == (False, True)
    assert first[:2] == again[:2]
    assert first[0] == 200


async def test_it_is_the_request_that_must_be_the_same_not_the_bytes() -> None:
    async with serving() as server:
        await ask(server, {"model": "small", "messages": chat()["messages"]})
        data = json.dumps({"messages": chat()["messages"], "model": "small", "user": "me"}, indent=4)
        async with server.http.post(server.url + PATH, data=data, headers=KEY | {"Content-Type": "application/json"}) as response:
            assert response.headers["Idempotent-Replayed"] == "true"
        assert len(server.engine.requests) == 1


@pytest.mark.parametrize(
    "other",
    [
        chat("Another question?"),
        chat(temperature=0.5),
        chat(stream=True),
        chat(explain=True),
        {"messages": [{"role": "assistant", "content": "What is it?"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]},
    ],
)
async def test_a_key_that_came_with_another_request_is_a_422(other: dict[str, Any]) -> None:
    async with serving() as server:
        await ask(server, chat())
        status, answer, _ = await ask(server, other)
        assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
        assert (await ask(server, {"prompt": "What is it?"}, path="/v1/completions"))[0] == 422
        assert len(server.engine.requests) == 1


async def test_another_key_or_none_is_another_request() -> None:
    async with serving() as server:
        for headers in (KEY, {"Idempotency-Key": "order-67"}, {}, {}):
            await ask(server, chat(), headers)
        assert len(server.engine.requests) == 4


async def test_a_key_that_is_none_is_a_400() -> None:
    async with serving() as server:
        for key in ("", "k" * 256, "ключ"):
            status, answer, _ = await ask(server, chat(), {"Idempotency-Key": key})
            assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("stream", [False, True])
async def test_who_asks_while_the_first_is_answered_joins_and_both_get_all(stream: bool) -> None:
    engine = FakeEngine(say_first_word)
    async with serving(engine) as server:
        first = asyncio.create_task(ask(server, chat(stream=stream)))
        await engine.wait_until(lambda: len(engine.generations) == 1)
        engine.generations[0].push(Delta(0, " is"))
        second = asyncio.create_task(ask(server, chat(stream=stream)))
        while len(server.gateway._state._inside) < 2:
            await asyncio.sleep(0.01)
        engine.generations[0].push(Delta(0, " a cat.", finish_reason=FinishReason.STOP))
        answers = [await first, await second]
        assert len(engine.requests) == 1
    assert [answer[2] for answer in answers] == [False, True]
    if stream:
        said = ["".join(event["choices"][0]["delta"].get("content") or "" for event in answer[1][:-1]) for answer in answers]
        assert said == ["It is a cat."] * 2
        assert len({event["id"] for _, events, _ in answers for event in events[:-1]}) == 1
    else:
        assert answers[0][1] == answers[1][1]


async def test_the_answer_goes_on_when_the_first_leaves_and_ends_with_the_last() -> None:
    """The connection that broke is why the request comes again; but nobody's answer is nobody's GPU."""
    engine = FakeEngine(say_nothing)
    async with serving(engine) as server:
        first = asyncio.create_task(ask(server, chat()))
        await engine.wait_until(lambda: len(engine.generations) == 1)
        second = asyncio.create_task(ask(server, chat()))
        while len(server.gateway._state._inside) < 2:
            await asyncio.sleep(0.01)
        first.cancel()
        while len(server.gateway._state._inside) > 1:
            await asyncio.sleep(0.01)
        assert engine.cancelled == []
        second.cancel()
        await engine.wait_until(lambda: engine.cancelled == ["fake-0"])
        await asyncio.gather(first, second, return_exceptions=True)
        third = asyncio.create_task(ask(server, chat()))
        await engine.wait_until(lambda: len(engine.generations) == 2)
        engine.generations[1].push(Delta(0, "It", finish_reason=FinishReason.STOP))
        assert (await third)[0::2] == (200, False)


async def test_a_refusal_is_not_kept() -> None:
    async with serving() as server:
        server.engine.refusal = Overloaded("the queue is full")
        assert (await ask(server, chat()))[0] == 503
        server.engine.refusal = None
        assert (await ask(server, chat()))[0::2] == (200, False)


async def test_a_full_server_still_gives_the_answer_it_has() -> None:
    async with serving() as server:
        await ask(server, chat())
        server.engine.is_full = True
        assert (await ask(server, chat()))[0::2] == (200, True)


async def test_tenants_do_not_see_each_others_answers() -> None:
    answers = Answers(FakeEngine().submit)
    for tenant in ("a", "b"):
        replay = await answers.submit("key", b"mark", question(tenant))
        assert not replay.is_repeat
    assert (await answers.submit("key", b"mark", question("a"))).is_repeat


async def test_answers_are_kept_for_ten_minutes_and_no_more_of_them_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    engine = FakeEngine()
    answers = Answers(engine.submit, now_s=lambda: now_s)

    async def is_repeat(key: str) -> bool:
        replay = await answers.submit(key, b"mark", question("a"))
        async for _ in replay:
            pass
        return replay.is_repeat

    assert not await is_repeat("old")
    now_s = 599.0
    assert await is_repeat("old")
    now_s = 601.0
    assert not await is_repeat("old")
    monkeypatch.setattr(idempotency, "MAX_ANSWERS", 3)
    for number in range(10):
        assert not await is_repeat(f"key-{number}")
        assert len(answers) <= 3
    assert await is_repeat("key-9")
    monkeypatch.setattr(idempotency, "MAX_BYTES", 10_000)
    for number in range(10):
        assert not await is_repeat(f"other-{number}")
    assert sum(answer.num_bytes for answer in answers._answers.values()) <= 15_000


def question(tenant: str) -> ChatRequest:
    return ChatRequest(messages=(Message("user", ("Hi",)),), tenant=tenant)


async def test_an_answer_that_is_kept_keeps_no_media() -> None:
    """Ten minutes of requests with pictures would be gigabytes."""
    async with serving() as server:
        await ask(server, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]})
        (answer,) = server.gateway._state.answers._answers.values()
        assert not answer.is_running
        assert answer._readers == set()
        assert answer._source is not None
        assert answer._source.on_cancel is None
