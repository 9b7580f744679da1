"""The terminal client against a real socket."""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path

import pytest
from fake_engine import FakeEngine, parts_of, say_words
from gateway_client import serving
from rich.console import Console

from mmserve.cli import chat
from mmserve.cli.chat import ChatError, Client, Conversation, parse_event
from mmserve.errors import TooLarge, UndecodableMedia
from mmserve.token_stream import Delta


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args(words)


async def talk(url: str, *words: str, lines: list[str] | None = None, status: int = 0) -> str:
    """What the terminal shows."""
    shown = io.StringIO()
    console = Console(file=shown, width=200, highlight=False)
    left = iter(lines or [])

    def read(prompt: object) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    console.input = read  # type: ignore[method-assign, assignment]
    assert await asyncio.to_thread(chat.talk, arguments("--url", url, *words), console) == status
    return shown.getvalue()


async def test_a_question_on_the_command_line_is_answered_and_that_is_all(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG cat")
    async with serving() as server:
        assert await talk(server.url, "What is it?", "--image", str(tmp_path / "cat.png"), "--model", "large") == "It is a cat.\n"
        (request,) = server.engine.requests
        assert parts_of(request) == [b"\x89PNG cat", "What is it?"]
        assert (request.model, request.sampling.temperature) == ("large", 0.0)


async def test_a_conversation_carries_its_history_and_attachments_go_once(tmp_path: Path) -> None:
    (tmp_path / "my clip.wav").write_bytes(b"RIFF")
    lines = [f"/audio '{tmp_path}/my clip.wav'", "What is said?", "", "And then?", "/new", "Hello", "/help", "/dance", "/quit", "never"]
    async with serving() as server:
        shown = await talk(server.url, lines=lines)
        requests = server.engine.requests
    assert parts_of(requests[0]) == [b"RIFF", "What is said?"]
    assert parts_of(requests[1]) == [b"RIFF", "What is said?", "It is a cat.", "And then?"]
    assert [message.role for message in requests[1].messages] == ["user", "assistant", "user"]
    assert parts_of(requests[2]) == ["Hello"]
    assert len(requests) == 3
    assert "+ my clip.wav" in shown
    assert "unknown command /dance" in shown


async def test_a_refused_question_is_shown_and_forgotten() -> None:
    async with serving() as server:
        server.engine.refusal = TooLarge("the image has 99 megapixels")
        shown = await talk(server.url, lines=["One"])
        assert "the image has 99 megapixels (413)" in shown


async def test_after_a_refusal_only_the_next_question_is_sent() -> None:
    def refuse_the_first(generation, request) -> None:
        if generation.request_id == "fake-0":
            generation.fail(TooLarge("the image has 99 megapixels"))
        else:
            say_words(generation, request)

    async with serving(FakeEngine(refuse_the_first)) as server:
        await talk(server.url, lines=["One", "Two"])
        assert [parts_of(request) for request in server.engine.requests] == [["One"], ["Two"]]


async def test_an_error_in_the_stream_is_shown() -> None:
    def fail(generation, request) -> None:
        generation.push(Delta(0, "It"))
        generation.fail(UndecodableMedia("the image can't be decoded"))

    async with serving(FakeEngine(fail)) as server:
        assert "It\nthe image can't be decoded" in await talk(server.url, lines=["One"])


async def test_where_nobody_answers_the_way_to_start_a_server_is_said() -> None:
    assert "python -m mmserve" in await talk("http://127.0.0.1:9", "Hi", status=1)
    assert "no server answers" in await talk("not a url", "Hi", status=1)


async def test_the_key_is_sent() -> None:
    async with serving(api_key="secret") as server:
        assert await talk(server.url, "Hi", "--api-key", "secret") == "It is a cat.\n"
        async with Client(server.url, api_key=None, model="auto") as client:
            with pytest.raises(ChatError, match="401"):
                await client.greet()


def test_files_that_cannot_be_attached_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hi")
    conversation = Conversation()
    with pytest.raises(ChatError, match=r"notes\.txt is neither"):
        conversation.attach(tmp_path / "notes.txt")
    with pytest.raises(ChatError, match="can't read"):
        conversation.attach(tmp_path / "missing.png")
    assert conversation.attached == []


def test_lines_of_a_stream_that_say_nothing_are_nothing() -> None:
    assert parse_event(b": keep-alive\n") is None
    assert parse_event(b"\n") is None
    assert parse_event(b"data: [DONE]\n") is None
    assert parse_event(b'data: {"choices": []}\n') is None
    assert parse_event(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n') is None
    assert parse_event(b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n') == "Hi"
