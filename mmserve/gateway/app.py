"""The aiohttp application: routes, and the one middleware through which every answer and every error goes."""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from http import HTTPStatus

import orjson
from aiohttp import hdrs, web

from mmserve.errors import MmserveError, NotFound, TooLarge
from mmserve.gateway import pages, routes
from mmserve.gateway.body import check_declared
from mmserve.gateway.guard import PROBED_ROUTES, Guard
from mmserve.gateway.state import SHUTDOWN, STATE, ServerState

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GUARD = web.AppKey("guard", Guard)


def build_app(state: ServerState) -> web.Application:
    app = web.Application(middlewares=[_middleware], client_max_size=state.config.server.max_body_bytes)
    app[STATE] = state
    app[_GUARD] = Guard(state.config.server)
    for path, handler in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.completions),
        ("/v1/generate", routes.generate),
        ("/v1/feedback", routes.feedback),
    ):
        app.router.add_post(path, handler, expect_handler=_expect)
    app.router.add_get("/v1/models", pages.models)
    app.router.add_get("/v1/models/{name:.+}", pages.model)
    app.router.add_get("/health", pages.ready)
    app.router.add_get("/health/ready", pages.ready)
    app.router.add_get("/health/live", pages.live)
    app.router.add_get("/metrics", pages.metrics)
    app.router.add_get("/openapi.json", pages.openapi)
    pages.add_playground(app)
    app.on_response_prepare.append(_add_headers)
    return app


@web.middleware
async def _middleware(request: web.Request, handler: routes.Handler) -> web.StreamResponse:
    started_s = time.monotonic()
    given = request.headers.get("x-request-id", "")
    request[routes.REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else new_request_id()
    response: web.StreamResponse
    try:
        request.app[_GUARD].check(request, request.app[STATE])
        response = await handler(request)
    except MmserveError as error:
        if error.status >= 500 and error.status != 503:
            _log.error("request_id=%s failed code=%s", request[routes.REQUEST_ID], error.code)
        response = error_response(error)
    except web.HTTPException as error:
        response = _from_aiohttp(error)
    except ConnectionError:
        raise  # the client is gone, and aiohttp knows
    except Exception:
        _log.exception("request_id=%s failed", request[routes.REQUEST_ID])
        response = error_response(MmserveError("internal error"))
    _log_line(request, response.status, time.monotonic() - started_s)
    return response


def _log_line(request: web.Request, status: int, seconds: float) -> None:
    resource = request.match_info.route.resource
    route = "-" if resource is None else resource.canonical
    level = logging.DEBUG if route in PROBED_ROUTES else logging.INFO
    _log.log(level, "request_id=%s %s %s status=%d ms=%d", request[routes.REQUEST_ID], request.method, route, status, seconds * 1000)


def new_request_id() -> str:
    return uuid.uuid4().hex


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


def _from_aiohttp(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals, in our words."""
    match error.status:
        case HTTPStatus.NOT_FOUND:
            return error_response(NotFound("there is no such route"))
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return error_response(TooLarge("the body is too large"))
        case HTTPStatus.METHOD_NOT_ALLOWED:
            response = _plain_error(error.status, "method_not_allowed", "this route has other methods: see the header Allow")
            response.headers[hdrs.ALLOW] = error.headers.get(hdrs.ALLOW, "")
            return response
    return _plain_error(error.status, "invalid_request_error", HTTPStatus(error.status).phrase)


def _plain_error(status: int, code: str, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "internal_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue`: a body that will be refused is not asked for.  Runs before the middleware."""
    try:
        request.app[_GUARD].check(request, request.app[STATE])
        check_declared(request, request.app[STATE].config.server)
    except MmserveError as error:
        request[routes.REQUEST_ID] = new_request_id()
        return error_response(error)
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        request[routes.REQUEST_ID] = new_request_id()
        return _plain_error(HTTPStatus.EXPECTATION_FAILED, "invalid_request_error", "the only Expect known here is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer itself was sent
    return None


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request.get(routes.REQUEST_ID, "")
    response.headers[hdrs.SERVER] = "mmserve"
    response.headers["X-Content-Type-Options"] = "nosniff"
