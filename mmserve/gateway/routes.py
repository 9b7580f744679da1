"""The routes that take a body: three that generate, and the feedback on what they gave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from mmserve.gateway.answer import ChatSchema, CompletionSchema, MakeSchema
from mmserve.gateway.body import read_body
from mmserve.gateway.call import Bounds, Call, Caller
from mmserve.gateway.chat_api import parse_chat
from mmserve.gateway.completions_api import parse_completion
from mmserve.gateway.deliver import deliver
from mmserve.gateway.feedback_api import parse_feedback
from mmserve.gateway.generate_api import parse_generate
from mmserve.gateway.json_body import check_content_type
from mmserve.gateway.multipart import parse_boundary
from mmserve.gateway.state import REQUEST_ID, STATE, ServerState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parse = Callable[[bytes, Bounds, Caller], Call]

_TENANT = "default"
_INLINE_BYTES = 32 * 1024  # a body up to this is parsed on the loop, in well under a millisecond


async def chat(request: web.Request) -> web.StreamResponse:
    check_content_type(request.headers.get(hdrs.CONTENT_TYPE))
    state = request.app[STATE]
    return await _generate(request, state, parse_chat, ChatSchema)


async def completions(request: web.Request) -> web.StreamResponse:
    check_content_type(request.headers.get(hdrs.CONTENT_TYPE))
    state = request.app[STATE]
    return await _generate(request, state, parse_completion, CompletionSchema)


async def generate(request: web.Request) -> web.StreamResponse:
    boundary = parse_boundary(request.headers.get(hdrs.CONTENT_TYPE))
    state = request.app[STATE]

    def parse(data: bytes, bounds: Bounds, caller: Caller) -> Call:
        return parse_generate(data, boundary, bounds, caller)

    return await _generate(request, state, parse, ChatSchema)


async def feedback(request: web.Request) -> web.StreamResponse:
    check_content_type(request.headers.get(hdrs.CONTENT_TYPE))
    state = request.app[STATE]
    with state.bodies.enter() as held:
        data = await read_body(request, state.config.server, held)
    state.engine.ledger.record_feedback(parse_feedback(data, tenant=_TENANT, now_s=time.time()))
    return web.json_response({"object": "feedback", "recorded": True})


async def _generate(request: web.Request, state: ServerState, parse: Parse, schema: MakeSchema) -> web.StreamResponse:
    with state.visit(), state.bodies.enter() as held:
        state.engine.check_room()  # before megabytes are read and parsed for nothing
        data = await read_body(request, state.config.server, held)
        caller = Caller(request_id=request[REQUEST_ID], tenant=_TENANT)
        if len(data) <= _INLINE_BYTES:
            call = parse(data, state.bounds, caller)
        else:
            call = await asyncio.to_thread(parse, data, state.bounds, caller)
        del data
        held.resize(call.request.num_bytes)
        return await deliver(request, call, schema, state)
