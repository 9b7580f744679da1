"""What the gateway's tests share: a server on a real socket over the fake engine, and plain clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
from fake_engine import FakeEngine

from mmserve.config import Config, from_mapping
from mmserve.gateway.server import Gateway

PNG = "data:image/png;base64,iVBORw0KGgo="
PNG_BYTES = b"\x89PNG\r\n\x1a\n"


@dataclass
class Server:
    engine: FakeEngine
    gateway: Gateway
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.gateway.url

    def openai(self, key: str = "unused") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream: objects, and the string [DONE]."""
        async with self.http.post(self.url + path, json=body) as response:
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        return [event_of(block) for block in text.split("\n\n") if block and not block.startswith(":")]


def event_of(block: str) -> Any:
    data = block.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def chat(text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Server]:
    engine = engine or FakeEngine()
    config: Config = from_mapping({"port": 0, **settings})
    async with Gateway(engine, config) as gateway, aiohttp.ClientSession() as http:
        yield Server(engine, gateway, http)


@asynccontextmanager
async def sent(url: str, body: bytes) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection on which a chat request was sent and nothing is read; closed at the end, whatever the server did."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        yield writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def raw(url: str, data: bytes) -> bytes:
    """Send bytes as they are, and read one answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            return head + await reader.readexactly(int(length[1]) if length else 0)
    finally:
        writer.close()
        await writer.wait_closed()
