"""From an accepted generation to bytes at the client: one object, or a stream.  A client that leaves cancels its generation.

A stream's headers wait for its first token (or `keep_alive_s`), so that a picture that can't be decoded is an HTTP 422 there, too.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Self

import orjson
from aiohttp import web

from mmserve.errors import MmserveError
from mmserve.gateway.answer import Answer, Choice, MakeSchema, collect, server_timing
from mmserve.gateway.call import Call
from mmserve.gateway.idempotency import Replay, Submit
from mmserve.gateway.protocol import Connection
from mmserve.gateway.refusals import unexpected
from mmserve.gateway.sse import DONE, KEEP_ALIVE, EventStream, event
from mmserve.gateway.state import ServerState
from mmserve.token_stream import Delta, Generation

_log = logging.getLogger(__name__)


async def deliver(request: web.Request, call: Call, schema: MakeSchema, state: ServerState, submit: Submit) -> web.StreamResponse:
    """Raises MmserveError if nothing was sent yet; after that errors go into the stream."""
    generation = await submit(call.request)
    with state.hold(generation):
        answer = Answer(
            generation,
            schema(lambda token_id: state.engine.token_text(token_id, generation.model)),
            model=state.shown_model(call.request.model),
            usage_in_chunks=call.include_usage,
            explain=call.explain,
        )
        send = _send_stream if call.stream else _send_whole
        return await send(request, call, generation, answer, state)


async def _send_whole(request: web.Request, call: Call, generation: Generation, answer: Answer, state: ServerState) -> web.StreamResponse:
    choices = [Choice() for _ in range(call.request.sampling.n)]
    while deltas := await generation.next_batch():
        collect(choices, deltas)
    if any(choice.finish_reason is None for choice in choices):
        raise state.ended_early()
    return web.Response(body=orjson.dumps(answer.whole(choices)), content_type="application/json", headers=_headers(generation))


async def _send_stream(request: web.Request, call: Call, generation: Generation, answer: Answer, state: ServerState) -> web.StreamResponse:
    keep_alive_s = state.config.server.keep_alive_s
    async with _Batches(generation) as batches:
        has_first = await batches.wait_first(keep_alive_s)
        async with EventStream(request, _headers(generation), keep_alive_s=keep_alive_s) as stream:
            num_open = call.request.sampling.n
            generation.bound(state.config.server.max_backlog_bytes, partial(_drop_if_stalled, request, stream))
            try:
                if not has_first:
                    await stream.send(KEEP_ALIVE)
                while deltas := await batches.next():
                    num_open -= sum(1 for delta in deltas if delta.finish_reason is not None)
                    await stream.send(answer.events(deltas))
                if num_open > 0:
                    raise state.ended_early()
                await stream.send(answer.closing())
            except ConnectionError:
                raise
            except MmserveError as error:
                await stream.send(event(error.body()))
            except Exception as error:
                await stream.send(event(unexpected(error, _log, generation.request_id).body()))
            await stream.send(DONE)
        return stream.response


def _drop_if_stalled(request: web.Request, stream: EventStream) -> None:
    """More waits for the reader than may.  That is our own fault if nothing is being written to it."""
    if stream.is_writing:
        assert isinstance(request.protocol, Connection)
        request.protocol.drop_slow_reader()


class _Batches:
    """Batch after batch of a generation.  The first can be waited for with a limit, without losing it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._first: asyncio.Task[list[Delta]] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)

    async def wait_first(self, timeout_s: float) -> bool:
        """Whether there is something to send, after `timeout_s` at most.  Raises what the generation raises before its first delta."""
        self._first = asyncio.create_task(self._generation.next_batch())
        await asyncio.wait({self._first}, timeout=timeout_s)
        if self._first.done():
            self._first.result()
        return self._first.done()

    async def next(self) -> list[Delta]:
        """Empty at the end."""
        if self._first is None:
            return await self._generation.next_batch()
        first, self._first = self._first, None
        return await first


def _headers(generation: Generation) -> dict[str, str]:
    """Who answers and why, what became of the media, and the time each stage has taken so far."""
    headers = {"x-mmserve-model": generation.model, "x-mmserve-route-reason": generation.route_reason}
    if isinstance(generation, Replay) and generation.is_repeat:
        headers["Idempotent-Replayed"] = "true"
    for name, notices in (("degraded", generation.degraded), ("fallback", generation.fallback)):
        if notices:
            headers[f"x-mmserve-{name}"] = ", ".join(sorted({one.kind for one in notices}))
    if generation.cost is not None:  # a stream's comes at its end, in what `explain` adds
        headers["x-mmserve-cost-usd"] = f"{generation.cost.usd:.9f}"
    if generation.timings:
        headers["Server-Timing"] = server_timing(generation.timings)
    return headers
