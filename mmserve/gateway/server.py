"""One listening server: bind, open, and leave without dropping anybody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from typing import Self

from aiohttp import web

from mmserve.config import Config, ConfigError, ServerConfig
from mmserve.gateway.app import build_app
from mmserve.gateway.face import EngineFace
from mmserve.gateway.guard import check_binding
from mmserve.gateway.protocol import Connections
from mmserve.gateway.state import Phase, ServerState

_log = logging.getLogger(__name__)

LINGER_S = 2.0  # a load balancer needs that long to see that we aren't ready; until then newcomers get a 503, not a closed port
_LAST_WORDS_S = 2.0  # for the error events of streams that are cut off
_LINGERING_BODY_S = 2.0  # the rest of a refused body is read for so long: a reset would swallow the answer
_BACKLOG = 1024
_NUM_LISTENERS = 32  # on one socket: uvloop accepts one connection a turn for each, and the others wait unseen in the backlog
_SEND_BUFFER_BYTES = 32 * 1024  # of the kernel, for each connection; it would take megabytes for a client that reads nothing
_OTHER_FILES = 200  # descriptors kept for workers, databases and whatever else: no connection ever takes the last one
_TCP_USER_TIMEOUT_MS = 30_000  # a peer that acknowledges nothing for this long is gone


class Gateway:
    """An async context manager for tests; `serve` of the command line calls the four verbs itself.

    Bound first, opened when the engine is started: meanwhile health says so, and everything else is a 503.
    """

    def __init__(self, engine: EngineFace, config: Config) -> None:
        check_binding(config.server, engine.tenants)
        self._config = config.server
        self._engine = engine
        self._state = ServerState(engine, config)
        self._runner: web.AppRunner | None = None
        self._listeners: list[asyncio.Server] = []
        self._hurry = asyncio.Event()
        self.url = ""

    async def bind(self) -> None:
        """Raises OSError if the address can't be had."""
        listener = _listen(self._config.host, self._config.port)
        self._runner = web.AppRunner(build_app(self._state), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WORDS_S)
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self.connections = Connections(
            self._runner.server,
            max_connections(self._config),
            self._engine.metrics,
            slow_client_s=self._config.slow_client_s,
            idle_s=self._config.idle_connection_s,
            lingering_s=_LINGERING_BODY_S,
        )
        for each in (listener, *(listener.dup() for _ in range(_NUM_LISTENERS - 1))):
            self._listeners.append(await loop.create_server(self.connections, sock=each, backlog=_BACKLOG))
        host, port = listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self.url = f"http://{shown}:{port}"

    def open(self) -> None:
        self._state.phase = Phase.OPEN

    async def drain(self, *, linger_s: float = 0.0) -> None:
        """Let nobody in, and those inside finish, for `shutdown_timeout` seconds at most; then cut them off with an error event."""
        self._state.phase = Phase.CLOSING
        timeout_s = self._config.shutdown_timeout
        leaving = asyncio.create_task(self._wait_for_all(min(linger_s, timeout_s)))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([leaving, hurry], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        hurry.cancel()
        results = await asyncio.gather(leaving, hurry, return_exceptions=True)
        if isinstance(results[0], Exception):
            _log.error("draining failed", exc_info=results[0])
        self._state.cut_off()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._state.wait_empty()

    async def _wait_for_all(self, linger_s: float) -> None:
        await asyncio.gather(self._engine.drain(self._config.shutdown_timeout), self._state.wait_empty(), asyncio.sleep(linger_s))

    def hurry(self) -> None:
        """Stop waiting for anybody."""
        self._hurry.set()

    async def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.bind()
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._state.cut_off()
        await self.close()


def max_connections(config: ServerConfig) -> int:
    """What was asked for, or what the limit of open files leaves.  Raises ConfigError if that is too little."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = limit - _OTHER_FILES
    if room < max(1, config.max_connections):
        wanted = _OTHER_FILES + max(1, config.max_connections)
        raise ConfigError(f"this process may open {limit} files and needs at least {wanted}: see `ulimit -n`", param="max-connections")
    return config.max_connections or room


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted sockets inherit it, and the next
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
