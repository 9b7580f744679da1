"""The aiohttp application: routes, and the one middleware through which every answer and every error goes."""

from __future__ import annotations

import logging
import re
import time
from http import HTTPStatus

from aiohttp import hdrs, web

from mmserve.errors import MmserveError
from mmserve.gateway import pages, routes
from mmserve.gateway.body import check_declared
from mmserve.gateway.guard import PROBED_ROUTES, TENANT, Guard
from mmserve.gateway.rate_limit import rate_limit_headers
from mmserve.gateway.refusals import error_response, from_aiohttp, new_request_id, plain_error, unexpected
from mmserve.gateway.state import REQUEST_ID, STATE, ServerState

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GUARD = web.AppKey("guard", Guard)


def build_app(state: ServerState) -> web.Application:
    app = web.Application(middlewares=[_middleware], client_max_size=state.config.server.max_body_bytes)
    app[STATE] = state
    app[_GUARD] = Guard(state.config.server, state.engine.tenants)
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
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else new_request_id()
    response: web.StreamResponse
    try:
        request.app[_GUARD].check(request, request.app[STATE])
        response = await handler(request)
    except MmserveError as error:
        if error.status >= 500 and error.status != 503:
            _log.error("request_id=%s failed code=%s", request[REQUEST_ID], error.code)
        response = error_response(error)
    except web.HTTPException as error:
        response = from_aiohttp(error)
    except ConnectionError:
        raise  # the client is gone, and aiohttp knows
    except Exception as error:
        response = error_response(unexpected(error, _log, request[REQUEST_ID]))
    _log_line(request, response.status, time.monotonic() - started_s)
    return response


def _log_line(request: web.Request, status: int, seconds: float) -> None:
    resource = request.match_info.route.resource
    route = "-" if resource is None else resource.canonical
    level = logging.DEBUG if route in PROBED_ROUTES else logging.INFO
    _log.log(level, "request_id=%s %s %s status=%d ms=%d", request[REQUEST_ID], request.method, route, status, seconds * 1000)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue`: a body that will be refused is not asked for.  Runs before the middleware."""
    try:
        request.app[_GUARD].check(request, request.app[STATE])
        check_declared(request, request.app[STATE].config.server)
    except MmserveError as error:
        request[REQUEST_ID] = new_request_id()
        return error_response(error)
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        request[REQUEST_ID] = new_request_id()
        return plain_error(HTTPStatus.EXPECTATION_FAILED, "invalid_request_error", "the only Expect known here is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer itself was sent
    return None


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request.get(REQUEST_ID, "")
    response.headers[hdrs.SERVER] = "mmserve"
    response.headers["X-Content-Type-Options"] = "nosniff"
    tenant = request.get(TENANT)
    if tenant is not None and (standing := request.app[STATE].engine.quotas.standing(tenant.tenant_id, time.monotonic())) is not None:
        response.headers.update(rate_limit_headers(standing))
