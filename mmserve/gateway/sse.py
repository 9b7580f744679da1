"""Server-sent events over one response: one write for all that waits, and a comment when nothing does.

A write waits for its reader; how long is for `protocol` to say, which sees whether it reads at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(one: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(one) + b"\n\n"


class EventStream:
    """An async context manager: the headers go out on entry, and its timer ends on exit.  `keep_alive_s` is the longest silence."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], *, keep_alive_s: float) -> None:
        self.response = web.StreamResponse(headers=_HEADERS | dict(headers))
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._now = asyncio.get_running_loop().time
        self._last_write_s = self._now()
        self.is_writing = False
        self._timer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._timer = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._timer is not None
        self._timer.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await self._timer
        if error is None:
            await self.response.write_eof()

    async def send(self, data: bytes) -> None:
        """Whole events, in one write.  Waits while the client's buffers are full."""
        if not data:
            return
        self._last_write_s, self.is_writing = self._now(), True
        try:
            await self.response.write(data)
            await self._request.writer.drain()  # aiohttp itself waits at every 64 KB only
        finally:
            self.is_writing = False

    async def _keep_alive(self) -> None:
        while True:
            wait_s = self._last_write_s + self._keep_alive_s - self._now()
            if wait_s > 0 or self.is_writing:
                await asyncio.sleep(wait_s if wait_s > 0 else self._keep_alive_s)
            else:
                await self.send(KEEP_ALIVE)
