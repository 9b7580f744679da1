"""`/v1/chat/completions` over a real socket, with OpenAI's own client where it can say it."""

from __future__ import annotations

import base64

import openai
import pytest
from fake_engine import FakeEngine, parts_of, say_first_word, say_nothing
from gateway_client import PNG, PNG_BYTES, chat, sent, serving

from mmserve.errors import ContextLengthExceeded, Overloaded, UndecodableMedia
from mmserve.request import FinishReason
from mmserve.token_stream import Delta


async def test_openai_client_reads_a_whole_answer_with_usage() -> None:
    async with serving() as server, server.openai() as client:
        answer = await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "It is a cat."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id == "chatcmpl-fake-0"
    assert answer.model == "fake-tiny"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (10, 5, 15)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.to_dict() == {"cached_tokens": 4, "text_tokens": 10, "image_tokens": 0, "audio_tokens": 0}


async def test_openai_client_reads_a_stream_whose_first_chunk_has_the_role_and_whose_last_has_the_reason() -> None:
    async with serving() as server, server.openai() as client:
        stream = await client.chat.completions.create(model="small", messages=[{"role": "user", "content": "Hi"}], stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is a cat."
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, None, None, None, "stop"]
    assert {chunk.model for chunk in chunks} == {"small"}
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


async def test_a_stream_ends_with_usage_in_a_chunk_without_choices_and_then_done() -> None:
    async with serving() as server:
        events = await server.events("/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["total_tokens"] == 15
    assert all(event["usage"] is None for event in events[:-2])


async def test_stream_headers_forbid_buffering_and_name_the_route() -> None:
    async with (
        serving() as server,
        server.http.post(server.url + "/v1/chat/completions", json=chat(stream=True, model="large")) as response,
    ):
        await response.read()
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert response.headers["x-mmserve-model"] == "large"
    assert response.headers["x-mmserve-route-reason"] == "the client asked"
    assert response.headers["Server-Timing"] == "prepare;dur=1.0"
    assert len(response.headers["x-request-id"]) == 32


async def test_n_choices_come_interleaved_by_index_and_whole() -> None:
    async with serving() as server, server.openai() as client:
        answer = await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}], n=3, max_tokens=2)
        stream = await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}], n=2, stream=True)
        texts = ["", ""]
        roles = []
        async for chunk in stream:
            roles += [choice.index for choice in chunk.choices if choice.delta.role]
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        (0, "It is", "length"), (1, "It is", "length"), (2, "It is", "length"),
    ]  # fmt: skip
    assert texts == ["It is a cat.", "It is a cat."]
    assert roles == [0, 1]


async def test_logprobs_have_token_bytes_and_alternatives_best_first() -> None:
    async with serving() as server, server.openai() as client:
        answer = await client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2, max_tokens=1
        )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("It", -0.5, [73, 116])
    assert [(other.token, other.logprob) for other in token.top_logprobs] == [("It", -0.5), (" is", -1.5)]


async def test_every_sampling_field_reaches_the_engine() -> None:
    async with serving() as server:
        status, _ = await server.post(
            "/v1/chat/completions",
            chat(
                max_completion_tokens=7, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=42, stop=["\n", "END"], stop_token_ids=[3],
                min_tokens=1, ignore_eos=True, presence_penalty=0.1, frequency_penalty=-0.1, repetition_penalty=1.1, logit_bias={"5": -100},
                priority=-2, cache_salt="mine", user="u", metadata={"a": "b"}, store=False, tools=[], response_format={"type": "text"},
            ),
        )  # fmt: skip
    assert status == 200
    (request,) = server.engine.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (7, 0.5, 0.9, 0, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (42, ("\n", "END"), (3,))
    assert (sampling.min_tokens, sampling.ignore_eos) == (1, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.1, 1.1)
    assert (dict(sampling.logit_bias), sampling.logprobs, sampling.n) == ({5: -100.0}, None, 1)
    assert (request.priority, request.cache_salt, request.model) == (-2, "mine", "auto")


async def test_parts_keep_the_clients_order_and_media_their_bytes() -> None:
    content = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
        {"type": "text", "text": " with <image-0> "},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,UklGRg=="}},
        {"type": "image_url", "image_url": {"url": "DATA:Image/JPG;charset=utf-8;BASE64,/9j/"}},
    ]
    async with serving() as server:
        status, _ = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert status == 200
    (request,) = server.engine.requests
    assert parts_of(request) == ["Compare ", PNG_BYTES, " with <image-0> ", b"RIFF", b"\xff\xd8\xff"]
    assert [item.param for item in request.media] == [
        "messages[0].content[1].image_url.url", "messages[0].content[3].audio_url.url", "messages[0].content[4].image_url.url",
    ]  # fmt: skip
    assert [item.detail for item in request.media] == ["low", "auto", "auto"]


async def test_input_audio_is_plain_base64_with_a_format() -> None:
    data = base64.b64encode(b"RIFFxxxxWAVE").decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    async with serving() as server:
        status, _ = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert status == 200
    assert parts_of(server.engine.requests[0]) == [b"RIFFxxxxWAVE"]


async def test_explain_says_the_route_the_media_and_the_stages() -> None:
    content = [{"type": "image_url", "image_url": {"url": PNG}}]
    body = {"messages": [{"role": "user", "content": content}], "explain": True}
    async with serving() as server:
        _, whole = await server.post("/v1/chat/completions", body)
        events = await server.events("/v1/chat/completions", body | {"stream": True})
    assert whole["mmserve"] == {
        "request_id": "fake-0",
        "route": {"model": "small", "reason": "short prompt"},
        "media": [{"kind": "image", "hash": PNG_BYTES.hex(), "tokens": 576, "source": "encoded"}],
        "stages_s": {"prepare": 0.001},
        "fused_tokens": 586,
    }
    assert events[-2]["choices"] == []
    assert events[-2]["mmserve"]["request_id"] == "fake-1"
    assert "usage" not in events[-2]


async def test_a_refusal_has_its_status_code_and_numbers() -> None:
    async with serving() as server, server.openai() as client:
        server.engine.refusal = ContextLengthExceeded("the prompt has 5000 tokens and the limit is 4096", param="messages")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}])
        server.engine.refusal = Overloaded("the queue is full", retry_after_s=2.4)
        with pytest.raises(openai.InternalServerError) as overloaded:
            await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert overloaded.value.status_code == 503
    assert overloaded.value.response.headers["Retry-After"] == "3"


async def test_an_unknown_model_is_a_404() -> None:
    async with serving() as server, server.openai() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_found"


async def test_an_error_before_the_first_token_of_a_stream_is_still_an_http_status() -> None:
    def fail(generation, request) -> None:
        generation.fail(UndecodableMedia("the image can't be decoded", param="messages[0].content[0].image_url.url"))

    async with serving(FakeEngine(fail)) as server, server.openai() as client:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}], stream=True)
    assert caught.value.code == "undecodable_media"


async def test_an_error_after_the_first_token_is_an_event_and_then_done() -> None:
    def fail(generation, request) -> None:
        generation.push(Delta(0, "It"))
        generation.fail(UndecodableMedia("the second image can't be decoded"))

    async with serving(FakeEngine(fail)) as server:
        events = await server.events("/v1/chat/completions", chat(stream=True))
        async with server.openai() as client:
            stream = await client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Hi"}], stream=True)
            with pytest.raises(openai.APIError, match="second image"):
                _ = [chunk async for chunk in stream]
    assert events[-2] == {
        "error": {
            "message": "the second image can't be decoded", "type": "invalid_request_error", "param": None, "code": "undecodable_media",
        }
    }  # fmt: skip
    assert events[-1] == "[DONE]"


async def test_a_bug_of_ours_is_a_500_without_a_word_about_it() -> None:
    def broken(generation, request) -> None:
        raise RuntimeError("/secret/path at 0x7f00")

    async with serving(FakeEngine(broken)) as server:
        status, body = await server.post("/v1/chat/completions", chat())
        stream_status, stream_body = await server.post("/v1/chat/completions", chat(stream=True))
    assert (status, body) == (
        500,
        {"error": {"message": "internal error", "type": "internal_error", "param": None, "code": "internal_error"}},
    )
    assert (stream_status, stream_body) == (status, body)


async def test_a_client_that_leaves_a_stream_cancels_its_generation() -> None:
    engine = FakeEngine(say_first_word)
    async with serving(engine) as server:
        async with server.http.post(server.url + "/v1/chat/completions", json=chat(stream=True)) as response:
            await response.content.readany()
            response.close()
        await engine.wait_until(lambda: engine.cancelled == ["fake-0"])


async def test_a_client_that_leaves_before_the_first_token_cancels_its_generation_streaming_or_not() -> None:
    engine = FakeEngine(say_nothing)
    async with serving(engine) as server:
        for count, stream in ((1, b"false"), (2, b"true")):
            async with sent(server.url, b'{"messages": [{"role": "user", "content": "Hi"}], "stream": %s}' % stream):
                await engine.wait_until(lambda count=count: len(engine.generations) == count)
            await engine.wait_until(lambda count=count: len(engine.cancelled) == count)
    assert engine.cancelled == ["fake-0", "fake-1"]


async def test_silence_is_filled_with_comments_and_the_first_token_is_not_lost() -> None:
    engine = FakeEngine(say_nothing)
    async with (
        serving(engine, keep_alive_s=0.02) as server,
        server.http.post(server.url + "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        (generation,) = engine.generations
        generation.push(Delta(0, "It", finish_reason=FinishReason.STOP))
        rest = await response.read()
    assert b'"content":"It"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_all_that_waits_goes_out_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmserve.gateway.sse import EventStream

    writes: list[bytes] = []
    original = EventStream.send

    async def recording(self: EventStream, data: bytes) -> None:
        writes.append(data)
        await original(self, data)

    monkeypatch.setattr(EventStream, "send", recording)
    async with serving() as server:
        await server.events("/v1/chat/completions", chat(stream=True))
    assert [write.count(b"data: ") for write in writes if write] == [7, 1]  # role, five words and the reason; [DONE]


async def test_a_generation_that_stops_without_a_reason_is_an_error_not_a_silent_end() -> None:
    def vanish(generation, request) -> None:
        generation.push(Delta(0, "It"))
        generation._num_open = 0

    async with serving(FakeEngine(vanish)) as server:
        events = await server.events("/v1/chat/completions", chat(stream=True))
        status, _ = await server.post("/v1/chat/completions", chat())
    assert events[-2]["error"]["code"] == "internal_error"
    assert status == 500


async def test_a_reader_that_does_not_read_is_cut_off() -> None:
    def flood(generation, request) -> None:
        for _ in range(1000):
            generation.push(Delta(0, "x" * 20_000))

    engine = FakeEngine(flood)
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'
    async with serving(engine, keep_alive_s=0.02, slow_client_s=0.05) as server, sent(server.url, body):
        await engine.wait_until(lambda: engine.cancelled == ["fake-0"])


async def test_a_client_that_closes_its_half_of_the_connection_has_left() -> None:
    engine = FakeEngine(say_nothing)
    async with serving(engine) as server, sent(server.url, b'{"messages": [{"role": "user", "content": "Hi"}]}') as writer:
        await engine.wait_until(lambda: len(engine.generations) == 1)
        writer.write_eof()
        await engine.wait_until(lambda: engine.cancelled == ["fake-0"])
