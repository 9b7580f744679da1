"""A request's body, whole, within a size and a deadline.  Both are checked as the bytes come, and the size before, where it is declared."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from mmserve.config import ServerConfig
from mmserve.errors import BadRequest, RequestTimeout, TooLarge, UnsupportedMedia


async def read_body(request: web.Request, config: ServerConfig) -> bytes:
    """Raises TooLarge, RequestTimeout, UnsupportedMedia or BadRequest; after the first two the connection closes."""
    check_declared(request, config)
    body = bytearray()  # a list of pieces would cost sixty times its bytes if they came one by one
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while piece := await request.content.readany():
                body += piece
                if len(body) > config.max_body_bytes:
                    raise _too_large(config)
    except TimeoutError:
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
