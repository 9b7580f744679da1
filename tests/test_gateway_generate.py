"""`/v1/generate` (forms), `/v1/completions`, and the multipart parser beneath the former."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from fake_engine import parts_of
from gateway_client import serving
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.errors import BadRequest, UnsupportedMedia
from mmserve.gateway.generate_api import place_media
from mmserve.gateway.multipart import FormPart, parse_boundary, parse_multipart
from mmserve.media import MediaItem, MediaKind

CAT, DOG, CLIP = b"\x89PNG cat", b"\x89PNG dog", b"RIFF clip"


def form(prompt: str | None, *media: tuple[str, bytes], options: Any = None) -> aiohttp.FormData:
    data = aiohttp.FormData(quote_fields=False)
    if prompt is not None:
        data.add_field("prompt", prompt)
    for name, content in media:
        data.add_field(name, content, filename="file", content_type="application/octet-stream")
    if options is not None:
        data.add_field("options", json.dumps(options), content_type="application/json")
    data._is_multipart = True  # also without a file, as a browser does
    return data


async def generate(server: Any, data: aiohttp.FormData) -> tuple[int, Any]:
    async with server.http.post(server.url + "/v1/generate", data=data) as response:
        return response.status, await response.json()


async def test_media_stand_where_the_prompt_says() -> None:
    async with serving() as server:
        status, answer = await generate(
            server, form("Is <image-1> like <image-0>? <audio-0>!", ("image", CAT), ("audio", CLIP), ("image", DOG))
        )
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "It is a cat."
    assert parts_of(server.engine.requests[0]) == ["Is ", DOG, " like ", CAT, "? ", CLIP, "!"]
    assert [item.param for item in server.engine.requests[0].media] == ["image[1]", "image[0]", "audio[0]"]


async def test_media_without_a_placeholder_stand_before_the_text_in_order() -> None:
    async with serving() as server:
        status, _ = await generate(server, form("What? <image-1>", ("image", CAT), ("image", DOG), ("audio", CLIP)))
    assert status == 200
    assert parts_of(server.engine.requests[0]) == [CAT, CLIP, "What? ", DOG]


async def test_a_placeholder_without_media_is_a_400() -> None:
    async with serving() as server:
        status, answer = await generate(server, form("What is in <image-1>?", ("image", CAT)))
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "<image-1>" in answer["error"]["message"]
        status, answer = await generate(server, form("Say <audio-0>", ("image", CAT)))
        assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_options_are_the_fields_of_chat() -> None:
    async with serving() as server:
        status, _ = await generate(server, form("Hi", options={"max_tokens": 3, "model": "large", "temperature": 0, "detail": "low"}))
        assert status == 200
        request = server.engine.requests[0]
        assert (request.sampling.max_tokens, request.model, request.sampling.temperature) == (3, "large", 0.0)
        status, answer = await generate(server, form("Hi", options={"max_token": 3}))
        assert (status, answer["error"]["param"]) == (400, "max_token")
        status, answer = await generate(server, form("Hi", options=[1]))
        assert status == 400


async def test_a_form_can_be_answered_by_a_stream() -> None:
    async with serving() as server, server.http.post(server.url + "/v1/generate", data=form("Hi", options={"stream": True})) as response:
        text = (await response.read()).decode()
    assert response.content_type == "text/event-stream"
    assert '"object":"chat.completion.chunk"' in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (form(None, ("image", CAT)), "prompt"),
        (form("a", ("prompt", b"b")), "prompt"),
        (form("", options={}), "prompt"),
        (form("Hi", ("image", b"")), "image[0]"),
        (form("Hi", ("video", b"x")), "video"),
        (form("Hi", *[("image", CAT)] * 9), "image or audio"),
        (form("<image-0>" * 9, ("image", CAT)), "prompt"),
    ],
)
async def test_a_wrong_form_is_a_400_that_names_the_part(data: aiohttp.FormData, param: str) -> None:
    async with serving() as server:
        status, answer = await generate(server, data)
        assert server.engine.requests == []
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_picture_called_a_sound_is_a_400_and_another_body_type_a_415() -> None:
    data = form("Hi")
    data.add_field("audio", CAT, filename="a.png", content_type="image/png")
    async with serving() as server:
        status, answer = await generate(server, data)
        assert (status, answer["error"]["param"]) == (400, "audio[0]")
        status, answer = await server.post("/v1/generate", {"prompt": "Hi"})
        assert status == 415


def test_placeholders_are_exact_and_text_that_only_looks_like_one_stays_text() -> None:
    cat = MediaItem(MediaKind.IMAGE, CAT)
    assert place_media("<image-00> <Image-0> <image-> < image-0>", [cat]) == (cat, "<image-00> <Image-0> <image-> < image-0>")
    many = [MediaItem(MediaKind.IMAGE, bytes([i])) for i in range(12)]
    assert place_media("<image-11><image-1>", many)[-2:] == (many[11], many[1])  # an index of two digits is one index


SCRAPS = [b"--XX", b"\r\n", b"--", b"\r\n\r\n", b'content-disposition: form-data; name="a"']


def multipart(*parts: bytes, boundary: bytes = b"XX", preamble: bytes = b"", epilogue: bytes = b"") -> bytes:
    return preamble + b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n" + epilogue


def part(name: str, data: bytes, *headers: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="' + name.encode() + b'"\r\n' + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + data


def test_parts_are_cut_exactly_also_around_what_looks_like_a_boundary() -> None:
    body = multipart(
        part("a", b"1\r\n--X\r\n--XYZ\r\n"), part("b", b"", b"Content-Type: Image/PNG; x=y"), preamble=b"hello\r\n", epilogue=b"bye"
    )
    assert parse_multipart(body, b"XX") == [FormPart("a", "", b"1\r\n--X\r\n--XYZ\r\n"), FormPart("b", "image/png", b"")]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"--XX", b"--XX\r\n", b"--XX--", b"no boundary at all",
        b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\nnever ends',
        multipart(b"\r\nno headers"),
        multipart(b"Content-Type: image/png\r\n\r\nno name"),
        multipart(b'Content-Disposition: attachment; name="a"\r\n\r\nx'),
        multipart(part("a", b"eA==", b"Content-Transfer-Encoding: base64")),
        multipart(part("a", b"x", b"Content-Encoding: gzip")),
        multipart(part("a", b"x", b"X-Long: " + b"y" * 9000)),
        multipart(part("a", b"x", b"X-Bad: \xff")),
        multipart(*[part("a", b"x")] * 65),
    ],
)  # fmt: skip
def test_a_malformed_form_is_a_bad_request_or_empty(body: bytes) -> None:
    if body == b"--XX--":
        assert parse_multipart(body, b"XX") == []
        return
    with pytest.raises(BadRequest):
        parse_multipart(body, b"XX")


def test_boundaries_come_quoted_or_not() -> None:
    assert parse_boundary("multipart/form-data; boundary=abc") == b"abc"
    assert parse_boundary('Multipart/Form-Data; charset=utf-8; boundary="a b:c"') == b"a b:c"
    for header in (None, "", "multipart/form-data", "multipart/mixed; boundary=x", "application/json", "multipart/form-data; boundary="):
        with pytest.raises(UnsupportedMedia):
            parse_boundary(header)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40).filter(lambda data: b"\r\n--XX" not in data), max_size=5))
def test_any_contents_come_back(contents: list[bytes]) -> None:
    body = multipart(*[part("a", data) for data in contents])
    assert [one.data for one in parse_multipart(body, b"XX")] == contents


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80) | st.lists(st.sampled_from(SCRAPS), max_size=12).map(b"".join))
def test_any_bytes_are_parts_or_a_bad_request(body: bytes) -> None:
    try:
        parse_multipart(body, b"XX")
    except BadRequest:
        return


async def test_openai_client_completes_text() -> None:
    async with serving() as server, server.openai() as client:
        answer = await client.completions.create(model="small", prompt="Once", logprobs=1, max_tokens=2)
        stream = await client.completions.create(model="small", prompt=["Once"], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert answer.object == "text_completion"
    assert answer.id == "cmpl-fake-0"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("It is", "length")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["It", " is"]
    assert answer.choices[0].logprobs.text_offset == [0, 2]
    assert answer.choices[0].logprobs.top_logprobs == [{"It": -0.5}, {" is": -0.5}]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "It is a cat."
    assert chunks[-1].usage is not None
    request = server.engine.requests[0]
    assert request.raw_prompt
    assert parts_of(request) == ["Once"]
    assert server.engine.requests[1].sampling.max_tokens == 16  # OpenAI's default for this route


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
async def test_completions_refuse_what_they_do_not_do(fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post("/v1/completions", fields)
    assert (status, answer["error"]["param"]) == (400, param)
