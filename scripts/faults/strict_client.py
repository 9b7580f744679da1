"""Asks, and takes nothing for granted: an answer that ends twice, not at all, or under another name is BrokenProtocol, not a shrug."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

TIMEOUT_S = 300.0
DONE = "[DONE]"


class BrokenProtocol(Exception):
    """The server said something that no server may say."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended.  `code` is None for those that went well."""

    request_id: str  # the server's own; empty for one that was refused
    texts: tuple[str, ...]  # of each choice
    finish_reasons: tuple[str | None, ...]
    prompt_tokens: int
    longest_pause_s: float  # between two pieces of it
    status: int = 200
    code: str | None = None
    retry_after_s: float = 0.0

    @property
    def said(self) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
        """What two runs of the same request must agree in."""
        return self.texts, self.finish_reasons


@dataclass(slots=True)
class StreamReader:
    """Events of one stream, in order.  Pure; raises BrokenProtocol."""

    num_choices: int
    texts: list[str] = field(init=False)
    finish_reasons: list[str | None] = field(init=False)
    request_id: str = ""
    prompt_tokens: int = 0
    code: str | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.texts = [""] * self.num_choices
        self.finish_reasons = [None] * self.num_choices

    def feed(self, data: str) -> bool:
        """The payload of one `data:` line.  Whether it brought text."""
        if self.done:
            raise BrokenProtocol(f"something after {DONE}: {data[:80]}")
        if data == DONE:
            self.done = True
            return False
        if self.code is not None:
            raise BrokenProtocol(f"something other than {DONE} after an error: {data[:80]}")
        event = orjson.loads(data)
        if "error" in event:
            self.code = str(event["error"]["code"])
            return False
        if self.request_id not in ("", event["id"]):
            raise BrokenProtocol("a stream changed its id")
        self.request_id = event["id"]
        if event.get("usage"):
            self.prompt_tokens = event["usage"]["prompt_tokens"]
        brought = [self._take(choice) for choice in event["choices"]]
        return any(brought)

    def end(self) -> None:
        """The connection was closed."""
        if not self.done:
            raise BrokenProtocol(f"a stream ended without {DONE}")
        if self.code is None and None in self.finish_reasons:
            raise BrokenProtocol("a choice ended without a finish_reason")

    def _take(self, choice: dict[str, Any]) -> bool:
        index, text, reason = choice["index"], choice["delta"].get("content") or "", choice["finish_reason"]
        if self.finish_reasons[index] is not None:
            raise BrokenProtocol(f"choice {index} went on after its end")
        self.texts[index] += text
        self.finish_reasons[index] = reason
        return bool(text)


class StrictClient:
    """One server; an async context manager.  Every request has a connection of its own, so that none is left over to be counted."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def __aenter__(self) -> StrictClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def ask(self, body: dict[str, Any], on_piece: Callable[[], None] = lambda: None) -> Answer:
        """One chat completion to its end.  Raises BrokenProtocol, and aiohttp.ClientError when the server goes away."""
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return await self._refused(response)
            if body.get("stream"):
                return await self._stream(response, body.get("n", 1), on_piece)
            answer = orjson.loads(await response.read())
            texts = tuple(choice["message"]["content"] for choice in answer["choices"])
            reasons = tuple(choice["finish_reason"] for choice in answer["choices"])
            if None in reasons or len(texts) != body.get("n", 1):
                raise BrokenProtocol("a choice is missing or unfinished")
            on_piece()
            return Answer(own_id(answer["id"]), texts, reasons, answer["usage"]["prompt_tokens"], 0.0)

    async def _stream(self, response: aiohttp.ClientResponse, num_choices: int, on_piece: Callable[[], None]) -> Answer:
        reader, pause_s, last_s = StreamReader(num_choices), 0.0, None
        async for line in response.content:
            if not line.startswith(b"data: "):
                if line.strip() and not line.startswith(b":"):
                    raise BrokenProtocol(f"a line that is no event: {line[:80]!r}")
                continue
            if reader.feed(line[6:].decode().strip()):
                now_s = time.monotonic()
                pause_s, last_s = max(pause_s, now_s - (last_s or now_s)), now_s
                on_piece()
        reader.end()
        reasons = tuple(reader.finish_reasons)
        return Answer(own_id(reader.request_id), tuple(reader.texts), reasons, reader.prompt_tokens, pause_s, code=reader.code)

    async def _refused(self, response: aiohttp.ClientResponse) -> Answer:
        try:
            code = str(orjson.loads(await response.read())["error"]["code"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise BrokenProtocol(f"status {response.status} without an error object") from None
        retry_after_s = float(response.headers.get("Retry-After", 0))
        return Answer("", (), (), 0, 0.0, status=response.status, code=code, retry_after_s=retry_after_s)


def own_id(answer_id: str) -> str:
    """`chatcmpl-0123` -> `0123`, as the ledger has it."""
    return answer_id.partition("-")[2]
