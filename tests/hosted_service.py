"""A small hosted encoder on a real socket, as docs/hosted_encoder.md describes one: rows are made of the item's digest.

`script` holds what happens to the next items: a status, a Reply, or a coroutine function that makes one.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web
from safetensors.numpy import save

Make = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


@dataclass
class HostedService:
    hidden: dict[str, int]  # by decoder
    version: str = "v1"
    url: str = ""
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)  # headers in lower case, and body
    num_elsewhere: int = 0
    script: list[int | web.Response | Make] = field(default_factory=list)
    always: int | web.Response | Make | None = None  # when the script is at its end

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(({name.lower(): value for name, value in request.headers.items()}, body))
        step = self.script.pop(0) if self.script else self.always
        if isinstance(step, int):
            return web.Response(status=step)
        if isinstance(step, web.Response):
            return step
        if step is not None:
            return await step(request, body)
        return self.answer(request, body)

    async def handle_elsewhere(self, request: web.Request) -> web.StreamResponse:
        """Where a redirect would lead."""
        self.num_elsewhere += 1
        return self.answer(request, await request.read())

    def answer(self, request: web.Request, body: bytes) -> web.Response:
        decoder = request.headers["x-mmserve-decoder"]
        shape = (int(request.headers["x-mmserve-rows"]), self.hidden[decoder])
        return self.reply({"rows": rows_of(body, decoder, shape)})

    def reply(self, tensors: dict[str, np.ndarray]) -> web.Response:
        return web.Response(body=save(tensors), headers={"x-mmserve-encoder-version": self.version})


def rows_of(data: bytes, decoder: str, shape: tuple[int, int]) -> np.ndarray:
    """float32 of `shape`: the same for the same bytes and decoder, and no two rows alike."""
    seed = int.from_bytes(hashlib.sha256(decoder.encode() + data).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@asynccontextmanager
async def hosted_service(hidden: dict[str, int]) -> AsyncIterator[HostedService]:
    service = HostedService(hidden)
    app = web.Application(client_max_size=32 * 2**20)
    app.router.add_post("/encode", service.handle)
    app.router.add_route("*", "/elsewhere", service.handle_elsewhere)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}/encode"
    try:
        yield service
    finally:
        await runner.cleanup()
