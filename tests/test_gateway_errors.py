"""What is refused at the door, and how it is said."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from gateway_client import PNG, chat, raw, serving

from mmserve.errors import BadRequest
from mmserve.gateway.call import Bounds, Caller
from mmserve.gateway.chat_api import parse_chat
from mmserve.media import MediaLimits

IMAGE = {"type": "image_url", "image_url": {"url": PNG}}


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


# a body, and the field that is wrong in it
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "Hi", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (said({"text": "Hi"}), "messages[0].content[0].type"),
    (said({"type": "video_url"}), "messages[0].content[0].type"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said({"type": "text", "text": "Hi", "bold": True}), "messages[0].content[0].bold"),
    (said({"image_url": {"url": PNG}}), "messages[0].content[0].type"),
    (said({"type": "image_url", "image_url": PNG}), "messages[0].content[0].image_url"),
    (said({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url"),
    (said({"type": "image_url", "image_url": {"url": PNG, "detail": "ultra"}}), "messages[0].content[0].image_url.detail"),
    (said(IMAGE, role="assistant"), "messages[0].content[0].type"),
    (said({"type": "input_audio", "input_audio": {"data": "AAAA"}}), "messages[0].content[0].input_audio.format"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_tokens="1"), "max_tokens"),
    (chat(max_tokens=1.0), "max_tokens"),
    (chat(max_tokens=2**63), "max_tokens"),
    (chat(max_tokens=5, max_completion_tokens=6), "max_completion_tokens"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(temperature=False), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(min_p=-0.1), "min_p"),
    (chat(n=0), "n"),
    (chat(n=10**6), "n"),
    (chat(seed=2**64), "seed"),
    (chat(seed=0.5), "seed"),
    (chat(stop=[""]), "stop"),
    (chat(stop=["x"] * 17), "stop"),
    (chat(stop=[1]), "stop"),
    (chat(stop_token_ids=[1000]), "stop_token_ids"),
    (chat(stop_token_ids=[-1]), "stop_token_ids"),
    (chat(stop_token_ids=[True]), "stop_token_ids"),
    (chat(logit_bias={"1000": 1}), "logit_bias"),
    (chat(logit_bias={"-1": 1}), "logit_bias"),
    (chat(logit_bias={"¹": 1}), "logit_bias"),
    (chat(logit_bias={"7": 1, "07": 1}), "logit_bias"),
    (chat(logit_bias={"7": "1"}), "logit_bias"),
    (chat(logit_bias={"7": 101}), "logit_bias"),
    (chat(logit_bias=[]), "logit_bias"),
    (chat(presence_penalty=-2.1), "presence_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(logprobs=3), "logprobs"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(ignore_eos=1), "ignore_eos"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_cost": True}), "stream_options.include_cost"),
    (chat(model=7), "model"),
    (chat(model="m" * 300), "model"),
    (chat(priority=2**40), "priority"),
    (chat(cache_salt="s" * 300), "cache_salt"),
    (chat(tools=[{"type": "function"}]), "tools"),
    (chat(functions=[{}]), "functions"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(response_format={"type": "json_object"}), "response_format"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(audio={"voice": "alloy"}), "audio"),
    (chat(guided_json={}), "guided_json"),
    (chat(temprature=0.5), "temprature"),
    ({**said(*[IMAGE] * 9)}, "messages"),
    (said(*[{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}] * 2), "messages"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_a_wrong_field_is_a_400_that_names_it(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(json.dumps(body).encode(), Bounds(vocab_size=1000, limits=MediaLimits()), Caller("id"))
    assert (caught.value.status, caught.value.type, caught.value.param) == (400, "invalid_request_error", param)
    assert len(caught.value.message) < 200


async def test_a_wrong_field_is_refused_in_openais_shape_and_reaches_no_engine() -> None:
    async with serving() as server:
        status, answer = await server.post("/v1/chat/completions", chat(temperature=3))
        assert server.engine.requests == []
    assert status == 400
    assert answer == {
        "error": {
            "message": "temperature must be between 0 and 2, got 3.0", "type": "invalid_request_error", "param": "temperature",
            "code": "invalid_request_error",
        }
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"7", b"{", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b'{"messages": "\xff"}', b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}", b'{"messages": "\\ud800"}', b'{"\\ud800": 1}',
        b'{"a":' + b"[" * 33 + b"]" * 33 + b"}", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a": [' + b"[]," * 600_000 + b"[]]}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_clean_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(body, Bounds(vocab_size=1000, limits=MediaLimits()), Caller("id"))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("body", [b"", b"\xff", b'{"messages": "\\ud800"}', b'{"a":' + b"[" * 100_000])
async def test_a_body_that_is_no_json_is_a_400_over_the_wire_too(body: bytes) -> None:
    async with serving() as server:
        headers = {"Content-Type": "application/json"}
        async with server.http.post(server.url + "/v1/chat/completions", data=body, headers=headers) as response:
            answer = await response.json()
    assert response.status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_json_must_be_called_json_so_that_a_web_page_cannot_send_it_unasked() -> None:
    async with serving() as server:
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            headers = {"Content-Type": content_type}
            async with server.http.post(server.url + "/v1/chat/completions", data=json.dumps(chat()), headers=headers) as response:
                answer = await response.json()
            assert response.status == 415
            assert "application/json" in answer["error"]["message"]
        headers = {"Content-Type": "application/json; charset=latin-1"}
        async with server.http.post(server.url + "/v1/chat/completions", data=json.dumps(chat()), headers=headers) as response:
            assert response.status == 400


async def test_words_that_are_no_text_can_be_named_in_an_error() -> None:
    """Bytes of a header beyond UTF-8, and a name that stands twice and is half a surrogate pair, were a 500: no JSON holds them."""
    async with serving() as server:
        for content_type, body in ((b"\xff", b"{}"), (b"application/json", b'{"\\ud800": 1, "\\ud800": 2}'), (b"multipart/\xff", b"")):
            for path in (b"chat/completions", b"feedback", b"generate"):
                head = b"POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
                answer = await raw(server.url, head % (path, content_type, len(body)) + body)
                assert answer[9:12] in (b"400", b"415")
                assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


async def test_an_audio_format_that_is_not_accepted_is_a_415_naming_those_that_are() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "m4a"}}
    async with serving() as server:
        status, answer = await server.post("/v1/chat/completions", said(part))
    assert status == 415
    assert answer["error"]["param"] == "messages[0].content[0].input_audio.format"
    assert "wav, mp3, flac, ogg" in answer["error"]["message"]


async def test_unknown_routes_and_methods_speak_the_same_error_language() -> None:
    async with serving() as server:
        status, answer = await server.get("/v1/nothing")
        assert (status, answer["error"]["code"]) == (404, "not_found")
        status, answer = await server.get("/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
        async with server.http.delete(server.url + "/metrics") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "GET,HEAD"


async def test_a_body_over_the_limit_is_a_413_declared_or_not() -> None:
    async def endless() -> Any:
        for _ in range(200):
            yield b"x" * 1024

    async with serving(max_body_bytes=10_000) as server:
        headers = {"Content-Type": "application/json"}
        async with server.http.post(server.url + "/v1/chat/completions", data=b"x" * 10_001, headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "too_large"
        async with server.http.post(server.url + "/v1/chat/completions", data=endless(), headers=headers) as response:
            assert response.status == 413


async def test_a_huge_body_that_asks_first_is_told_no_without_a_100() -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
    )
    async with serving() as server:
        answer = await raw(server.url, head)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_any_other_expectation_is_a_417() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: wonders\r\nContent-Length: 0\r\n\r\n"
    async with serving() as server:
        answer = await raw(server.url, head)
    assert answer.startswith(b"HTTP/1.1 417 ")
    assert b'"code":"invalid_request_error"' in answer


async def test_a_body_that_does_not_arrive_is_a_408_and_the_connection_closes() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{ab"
    async with serving(body_timeout_s=0.05) as server:
        answer = await raw(server.url, head)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


async def test_compressed_bodies_are_refused_before_they_grow() -> None:
    async with serving() as server:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with server.http.post(server.url + "/v1/chat/completions", data=b"\x1f\x8b", headers=headers) as response:
            assert response.status == 415


async def test_a_request_id_is_echoed_if_it_is_one_and_made_if_it_is_not() -> None:
    async with serving() as server:
        for given, echoed in (("abc-123", True), ("x" * 129, False), ("has space", False)):
            async with server.http.get(server.url + "/health", headers={"x-request-id": given}) as response:
                assert (response.headers["x-request-id"] == given) is echoed
        async with server.http.get(server.url + "/nowhere", headers={"x-request-id": "lost"}) as response:
            assert response.headers["x-request-id"] == "lost"


async def test_a_model_name_of_the_client_never_becomes_a_header() -> None:
    async with serving() as server:
        status, answer = await server.post("/v1/chat/completions", chat(model="a\r\nx-evil: 1"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_full_server_says_so_before_a_body_is_sent_and_after_megabytes_of_it() -> None:
    """It read, parsed and decoded 20 megapixels of picture to find that its queue was full: 13 ms of the one process in front."""
    async with serving() as server:
        server.engine.is_full = True
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9000000\r\n\r\n"
        answer = await raw(server.url, head)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 3\r\n" in answer
        large = said({"type": "image_url", "image_url": {"url": PNG + "A" * 5_000_000}})
        headers = {"Content-Type": "application/json"}
        body = io.BytesIO(json.dumps(large).encode())
        async with server.http.post(server.url + "/v1/chat/completions", data=body, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["message"]) == (503, "the queue is full")
        server.engine.is_full = False
        assert (await server.post("/v1/chat/completions", chat()))[0] == 200
