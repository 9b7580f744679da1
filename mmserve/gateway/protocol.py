"""Connections: how many, how patient we are with one that doesn't read, and an answer to what isn't HTTP in the shape of all our errors.

aiohttp closes a connection on which no whole request head arrived in the time an idle one is given, from its first moment on.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
import weakref
from typing import Any, cast

from aiohttp import web

from mmserve.errors import BadRequest, MmserveError, Overloaded
from mmserve.gateway.refusals import error_response, new_request_id, refusal_bytes
from mmserve.gateway.state import REQUEST_ID
from mmserve.metrics import Metrics

_log = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 16 * 1024  # what the transport takes before a writer has to wait for the reader
_REFUSAL_LINGER_S = 1.0  # closing at once would reset the connection, and the client would never read why
_MAX_LINGERING = 64  # refused connections that are open to be read; beyond that they are closed at once
_SLICE_BYTES = 16 * 1024  # of a body in chunks, parsed at a time
_FRAMING_BYTES = 16 * 1024  # that chunks may take, beside twice the bytes they bring
_CHECKS = 5  # of a reader's progress, in the time it is given


class Connections:
    """Those that are open, at most `most`.  Calling it makes the protocol of the next one: a `Connection`, or a `Refusal` when full."""

    def __init__(self, server: web.Server, most: int, metrics: Metrics, *, slow_client_s: float, idle_s: float, lingering_s: float) -> None:
        self.most = most
        self.metrics = metrics
        self.slow_client_s = slow_client_s
        self._server = server
        self._idle_s = idle_s
        self._lingering_s = lingering_s
        # Weak: one that never came to life must not count for ever.
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._refused: set[Refusal] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __call__(self) -> asyncio.Protocol:
        if len(self._open) >= self.most:
            self.metrics.connections_closed.labels("too_many").inc()
            return Refusal(self._refused)
        connection = Connection(
            self._server,
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # the middleware logs
            keepalive_timeout=self._idle_s,
            lingering_time=self._lingering_s,
            auto_decompress=False,
        )
        self._open.add(connection)
        self.metrics.connections.set(len(self._open))
        return connection

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self.metrics.connections.set(len(self._open))


class Connection(web.RequestHandler):
    """One of many.  `is_deaf` from when a body is refused: the rest is taken off the wire unread, so that the answer gets through."""

    def __init__(self, server: web.Server, connections: Connections, **options: Any) -> None:
        super().__init__(server, **options)
        self.is_deaf = False
        self._measured: web.BaseRequest | None = None  # the request whose body comes
        self._num_framing = 0  # bytes of it that are not body
        self._connections = connections
        self._line: asyncio.Transport | None = None  # aiohttp forgets its own while what is left is still being sent
        self._num_unread = 0
        self._read_s = 0.0  # when the reader was last seen to read
        self._check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._line = cast(asyncio.Transport, transport)  # uvloop's only look like it
        self._line.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.lost(self)
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        request = self._current_request
        if self.is_deaf:
            return
        if request is None or not request._message.chunked:
            super().data_received(data)
            return
        if request is not self._measured:
            self._measured, self._num_framing = request, 0
        for start in range(0, len(data) or 1, _SLICE_BYTES):
            piece, num_before = data[start : start + _SLICE_BYTES], request.content.total_bytes
            super().data_received(piece)
            self._num_framing += len(piece) - (request.content.total_bytes - num_before)
            if self._num_framing > 2 * request.content.total_bytes + _FRAMING_BYTES:
                self.is_deaf = True
                return

    def pause_writing(self) -> None:
        """More waits than the transport takes.  From here on the reader has to make progress, at whatever pace."""
        super().pause_writing()
        self._num_unread = self._count_unread()
        self._read_s = self._loop.time()
        self._check_again()

    def resume_writing(self) -> None:
        if self._check is not None:
            self._check.cancel()
        super().resume_writing()

    def drop_slow_reader(self) -> None:
        """At once: closing would wait for the reader, too."""
        if self._line is None or (self._line.is_closing() and self._check is None):
            return
        request = self._current_request
        request_id = "-" if request is None else request.get(REQUEST_ID, "-")
        _log.info("request_id=%s slow_client unread=%d", request_id, self._count_unread())
        self._connections.metrics.connections_closed.labels("slow_client").inc()
        self._line.abort()
        self._line = None

    def _check_again(self) -> None:
        self._check = self._loop.call_later(self._connections.slow_client_s / _CHECKS, self._check_reader)

    def _check_reader(self) -> None:
        num_unread, now_s = self._count_unread(), self._loop.time()
        if num_unread < self._num_unread:
            self._read_s = now_s
        self._num_unread = num_unread
        if now_s - self._read_s >= self._connections.slow_client_s:
            self.drop_slow_reader()
        else:
            self._check_again()

    def _count_unread(self) -> int:
        """Bytes in the transport's buffer and in the kernel's.  The latter moves long before the socket is called writable again."""
        if self._line is None:
            return 0
        sock = self._line.get_extra_info("socket")
        in_kernel = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0] if sock.fileno() >= 0 else 0
        return int(in_kernel) + self._line.get_write_buffer_size()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """aiohttp's own answers here are plain text with a parser's message, and each logs a traceback."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; only closing is left")
        request_id = new_request_id()
        if status < 500:
            _log.info("request_id=%s status=400 not valid HTTP: %s", request_id, type(exc).__name__)
            response = error_response(BadRequest("the request is not valid HTTP"))
        else:
            _log.error("request_id=%s failed outside its handler", request_id, exc_info=exc)
            response = error_response(MmserveError("internal error"))
        response.headers.update({"x-request-id": request_id, "Server": "mmserve"})
        response.force_close()
        return response


class Refusal(asyncio.Protocol):
    """A connection too many: told so, unread, and closed.  It stands in `lingering` while it is open."""

    def __init__(self, lingering: set[Refusal]) -> None:
        self._lingering = lingering
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        line = cast(asyncio.Transport, transport)
        if len(self._lingering) >= _MAX_LINGERING:
            line.abort()
            return
        self._lingering.add(self)
        line.write(refusal_bytes(Overloaded("too many connections are open", code="too_many_connections", retry_after_s=1.0)))
        line.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_LINGER_S, line.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lingering.discard(self)
        if self._timer is not None:
            self._timer.cancel()
