"""What the tests of attacks share: a real engine behind a real socket, asked with files, and what every refusal must be."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from gateway_client import Server, serving
from test_engine import config, settled

from mmserve import AsyncEngine

ADDRESS_OR_PATH = re.compile(r"0x[0-9a-f]{11,}|/(?:usr|home|tmp|proc|dev|etc)/|psm_|memfd|site-packages|Traceback|\.py\b", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.body["error"])


@dataclass(frozen=True)
class Target:
    engine: AsyncEngine
    server: Server

    async def ask(self, *parts: dict[str, Any], **fields: Any) -> Answer:
        """A greedy answer of eight tokens, or a refusal that says no more than it should."""
        body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}], "model": "small"}
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        data = io.BytesIO(json.dumps(body | sampling | fields).encode())
        return await self.post("/v1/chat/completions", data=data, headers={"Content-Type": "application/json"})

    async def send_form(self, kind: str, data: bytes) -> Answer:
        form = aiohttp.FormData({"prompt": "What is it?", "options": '{"max_tokens": 8, "temperature": 0, "ignore_eos": true}'})
        form.add_field(kind, io.BytesIO(data), filename="file", content_type="application/octet-stream")
        return await self.post("/v1/generate", data=form)

    async def post(self, path: str, **request: Any) -> Answer:
        async with self.server.http.post(self.server.url + path, **request) as response:
            text = await response.text()
        answer = Answer(response.status, json.loads(text))
        if response.status != 200:
            assert 400 <= response.status < 500, text
            assert set(answer.error) == {"message", "type", "param", "code"}
            assert len(answer.error["message"]) < 300
            assert not ADDRESS_OR_PATH.search(text), text
        return answer

    @property
    def num_deaths(self) -> int:
        """Decode processes that an input has cost."""
        return self.engine._media.decode.num_deaths

    @property
    def decode_pid(self) -> int:
        (pid,) = self.engine._media.decode.pids
        return pid


@asynccontextmanager
async def attacked(model: Path, data_dir: Path, **scheduler: Any) -> AsyncIterator[Target]:
    async with AsyncEngine(config(model, data_dir, **scheduler)) as engine, serving(engine) as server:
        yield Target(engine, server)
        await settled(engine)


def picture_part(data: bytes, declared: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{declared};base64,{base64.b64encode(data).decode()}"}}


def clip_part(data: bytes, declared: str = "audio/wav") -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"data:{declared};base64,{base64.b64encode(data).decode()}"}}
