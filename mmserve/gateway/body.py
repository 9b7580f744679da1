"""A request's body, whole: within a size, a deadline, a pace, and what all bodies together may take.

The size and the room for it are checked before a byte is read, where the length is declared, and as the bytes come.
"""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from mmserve.config import ServerConfig
from mmserve.errors import BadRequest, RequestTimeout, TooLarge, UnsupportedMedia
from mmserve.gateway.body_room import Held
from mmserve.gateway.protocol import Connection

PACE_WINDOW_S = 5.0  # the pace is measured over so long, and so a body that doesn't come at all is waited for


async def read_body(request: web.Request, config: ServerConfig, held: Held) -> bytes:
    """Raises TooLarge, RequestTimeout, Overloaded, UnsupportedMedia or BadRequest; after the first two the connection closes."""
    check_declared(request, config)
    held.grow_to(request.content_length or 0)
    loop, connection = asyncio.get_running_loop(), request.protocol
    assert isinstance(connection, Connection)
    deadline_s = loop.time() + config.body_timeout_s
    patience_s = loop.time() + PACE_WINDOW_S  # when it runs out; each byte adds to it, up to a window's worth
    body = bytearray()  # a list of pieces would cost sixty times its bytes if they came one by one
    try:
        async with asyncio.timeout_at(min(patience_s, deadline_s)) as limit:
            while piece := await request.content.readany():
                body += piece
                if len(body) > config.max_body_bytes:
                    connection.is_deaf = True
                    raise _too_large(config)
                if connection.is_deaf:
                    raise TooLarge("the body's chunks are too small: their framing is larger than what is in them")
                held.grow_to(len(body))
                patience_s = min(patience_s + len(piece) / config.min_body_rate, loop.time() + PACE_WINDOW_S)
                limit.reschedule(min(patience_s, deadline_s))
    except TimeoutError:
        if loop.time() < deadline_s:
            raise RequestTimeout(f"the body came at less than {config.min_body_rate} bytes a second") from None
        raise RequestTimeout(f"the body took longer than {config.body_timeout_s:g} s to arrive") from None
    except web.RequestPayloadError:
        raise BadRequest("the body is not what its headers say") from None
    return bytes(body)


def check_declared(request: web.Request, config: ServerConfig) -> None:
    """What the headers alone give away."""
    if request.content_length is not None and request.content_length > config.max_body_bytes:
        raise _too_large(config)
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not supported; send the body as it is")


def _too_large(config: ServerConfig) -> TooLarge:
    return TooLarge(f"the body is larger than {config.max_body_bytes} bytes")
