"""A connection that also answers what isn't HTTP in the shape of all our errors, and logs it quietly."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from mmserve.errors import BadRequest, MmserveError
from mmserve.gateway.app import error_response, new_request_id

_log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """aiohttp's own answers here are plain text with a parser's message, and each logs a traceback."""

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
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
