"""Errors as HTTP answers: one shape for ours, for aiohttp's own, and for what isn't HTTP.  Texts are fixed, or say what the client sent."""

from __future__ import annotations

import errno
import logging
import math
import uuid
from http import HTTPStatus

import orjson
from aiohttp import hdrs, web

from mmserve.errors import MmserveError, NotFound, Overloaded, TooLarge

SHUTDOWN = "shutdown"  # the code of who is sent elsewhere
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def new_request_id() -> str:
    return uuid.uuid4().hex


def unexpected(error: Exception, log: logging.Logger, request_id: str) -> MmserveError:
    """What a client is told of an error that nobody foresaw.  A machine that is used up is not a bug, and may be well again in a moment."""
    if is_used_up(error):
        log.error("request_id=%s failed: the machine has none left (%s)", request_id, error)
        return Overloaded("the machine is out of files, threads or memory", code="machine_used_up", retry_after_s=2.0)
    log.error("request_id=%s failed", request_id, exc_info=error)
    return MmserveError("internal error")


def is_used_up(error: Exception) -> bool:
    """Python says of a thread that can't be started in words alone."""
    is_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    return is_thread or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _USED_UP)


def error_response(error: MmserveError) -> web.Response:
    response = web.Response(status=error.status, body=orjson.dumps(error.body()), content_type="application/json")
    if error.retry_after_s is not None:
        response.headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        # Basic is for browsers: they ask for the playground's key as a password.
        response.headers.extend([(hdrs.WWW_AUTHENTICATE, "Bearer"), (hdrs.WWW_AUTHENTICATE, 'Basic realm="mmserve"')])
    if error.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE) or error.code == SHUTDOWN:
        response.force_close()  # the rest of the body is of no interest; and who comes back shall come to another server
    return response


def from_aiohttp(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals, in our words."""
    match error.status:
        case HTTPStatus.NOT_FOUND:
            return error_response(NotFound("there is no such route"))
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return error_response(TooLarge("the body is too large"))
        case HTTPStatus.METHOD_NOT_ALLOWED:
            response = plain_error(error.status, "method_not_allowed", "this route has other methods: see the header Allow")
            response.headers[hdrs.ALLOW] = error.headers.get(hdrs.ALLOW, "")
            return response
    return plain_error(error.status, "invalid_request_error", HTTPStatus(error.status).phrase)


def plain_error(status: int, code: str, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "internal_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def refusal_bytes(error: MmserveError) -> bytes:
    """A whole answer, for a connection that no request is read from."""
    body = orjson.dumps(error.body())
    retry_after_s = math.ceil(error.retry_after_s or 1)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {retry_after_s}\r\nConnection: close\r\nServer: mmserve\r\nx-request-id: {new_request_id()}\r\n\r\n"
    )
    return head.encode() + body
