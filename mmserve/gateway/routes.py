"""The routes that take a body: three that generate, and the feedback on what they gave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import hdrs, web

from mmserve.gateway.answer import ChatSchema, CompletionSchema, MakeSchema
from mmserve.gateway.body import read_body
from mmserve.gateway.call import Bounds, Call, Caller
from mmserve.gateway.chat_api import parse_chat
from mmserve.gateway.completions_api import parse_completion
from mmserve.gateway.deliver import deliver
from mmserve.gateway.feedback_api import parse_feedback
from mmserve.gateway.generate_api import parse_generate
from mmserve.gateway.guard import TENANT
from mmserve.gateway.idempotency import HEADER, fingerprint, parse_key
from mmserve.gateway.json_body import check_content_type
from mmserve.gateway.multipart import parse_boundary
from mmserve.gateway.state import REQUEST_ID, STATE, ServerState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parse = Callable[[bytes, Bounds, Caller], Call]

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
    state.engine.record_feedback(parse_feedback(data, tenant=request[TENANT].tenant_id, now_s=time.time()))
    return web.json_response({"object": "feedback", "recorded": True})


async def _generate(request: web.Request, state: ServerState, parse: Parse, schema: MakeSchema) -> web.StreamResponse:
    with state.visit(), state.bodies.enter() as held:
        tenant = request[TENANT]
        caller = Caller(request[REQUEST_ID], tenant.tenant_id, tenant.priority, tenant.cache_salt)
        key = parse_key(request.headers.get(HEADER))
        if not state.answers.knows(caller.tenant, key):
            state.engine.check_room(caller.tenant)  # before megabytes are read and parsed for nothing
        data = await read_body(request, state.config.server, held)

        def understand(data: bytes) -> tuple[Call, bytes]:
            call = parse(data, state.bounds, caller)
            return call, b"" if key is None else fingerprint(request.path, call)

        call, mark = understand(data) if len(data) <= _INLINE_BYTES else await asyncio.to_thread(understand, data)
        del data
        held.resize(call.request.num_bytes)
        submit = state.engine.submit if key is None else partial(state.answers.submit, key, mark)
        return await deliver(request, call, schema, state, submit)
